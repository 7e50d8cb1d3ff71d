"""An etcd with TLS, users and tokens that expire, reached as a config and the command reach it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from laminar.buffer.coordination import Change, Listing, Put, Transaction
from laminar.buffer.etcd_access import EtcdAccess
from laminar.config import parse_config
from laminar.errors import ConfigError, CoordinationError, CoordinationUnavailable
from laminar.workers.supervisor.run_etcd import reach

IDLE_S = 2.2
"""More than the second after which this etcd forgets a token that was not used."""


def access_from_config(etcd: Any, **changed: str) -> EtcdAccess:
    values = {
        "ca": str(etcd.certificates / "ca.pem"),
        "user": "laminar",
        "password_file": str(etcd.certificates / "password"),
        **changed,
    }
    lines = [f'{name} = "{value}"' for name, value in values.items()]
    text = f'[model]\npath = "m"\n[coordination]\nendpoints = ["https://{etcd.endpoint}"]\n' + "\n".join(lines)
    return parse_config(text).coordination.access()


async def test_a_config_names_certificates_user_and_where_the_password_is(
    secure_etcd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reach(access_from_config(secure_etcd))
    monkeypatch.setenv("MY_ETCD_PASSWORD", "secret")
    by_variable = access_from_config(secure_etcd, password_file="", password_env="MY_ETCD_PASSWORD")
    await reach(by_variable)
    assert "secret" not in f"{by_variable!r} {by_variable.arguments()}"


async def test_tokens_that_expire_are_renewed_unseen(secure_etcd: Any) -> None:
    client = access_from_config(secure_etcd).connect()
    lease, _ = await client.grant(30)
    async with aclosing(client.watch("/expiry/")) as events:  # type: ignore[type-var]
        assert isinstance(await anext(events), Listing)
        await asyncio.sleep(IDLE_S)
        assert await client.keep_alive(lease) > 0
        assert (await client.transact(Transaction((), (Put("/expiry/k", "1", lease),)))).succeeded
        change = await asyncio.wait_for(anext(events), 10)
        assert isinstance(change, Change) and change.kv and change.kv.value == "1"
    await asyncio.sleep(IDLE_S)
    async with aclosing(client.watch("/expiry/")) as events:  # type: ignore[type-var]
        assert isinstance(await asyncio.wait_for(anext(events), 10), Listing)
    await client.revoke(lease)
    await client.close()


async def test_a_watch_that_resumes_with_a_forgotten_token_logs_in_again(secure_etcd: Any) -> None:
    """It is resumed at a member that restarted: nothing was asked there before that would have renewed the token."""
    client = access_from_config(secure_etcd).connect()
    revision = await client.put("/forgotten/k", "1")
    client._connection._token = "forged"
    with pytest.raises(CoordinationUnavailable, match="refused the token; logging in again"):
        await anext(client._batches("/forgotten/", revision))
    await client.put("/forgotten/k", "2")
    batch = await anext(client._batches("/forgotten/", revision))
    assert [change.kv and change.kv.value for change in batch] == ["2"]
    await client.close()


async def test_many_calls_at_once_share_one_login(secure_etcd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login costs etcd tenths of a second: one for each caller would end in timeouts."""
    client = access_from_config(secure_etcd).connect()
    logins: list[object] = []
    login = client._connection._authenticate_at

    async def counted(link: Any) -> None:
        logins.append(link)
        await login(link)

    monkeypatch.setattr(client._connection, "_authenticate_at", counted)
    await asyncio.gather(*(client.get(f"/many/{i}") for i in range(30)))
    client._connection._token = "forged"
    await asyncio.gather(*(client.get(f"/many/{i}") for i in range(30)))
    assert len(logins) == 2
    await client.close()


async def refused(access: EtcdAccess, error: type[Exception], match: str) -> None:
    """Within seconds: what no waiting mends is not waited for."""
    started = time.monotonic()
    with pytest.raises(error, match=match):
        client = access.connect()
        try:
            await client.get("/k")
        finally:
            await client.close()
    assert time.monotonic() - started < 10


async def test_an_authority_that_did_not_sign_is_named(secure_etcd: Any) -> None:
    stranger = str(secure_etcd.certificates / "stranger.pem")
    await refused(
        access_from_config(secure_etcd, ca=stranger), CoordinationError, r"no trusted connection.*CERTIFICATE_VERIFY.*"
        r"coordination\.ca .*stranger\.pem\) vouches",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"cannot be used: .*no trusted connection"):
        await reach(access_from_config(secure_etcd, ca=stranger))


async def test_a_certificate_for_another_name_is_not_trusted(
    secure_etcd: Any, certificates: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "renamed"
    folder.mkdir()
    for name in ("ca.pem", "elsewhere.pem", "elsewhere.key"):
        (folder / name.replace("elsewhere", "server")).write_bytes((certificates / name).read_bytes())
    member = type(secure_etcd)(tmp_path / "data", folder)
    await member.start()
    try:
        await refused(member.access(""), CoordinationError, "no trusted connection.*made out to the names")
    finally:
        await member.stop()


async def test_a_wrong_password_a_missing_one_and_no_user_are_told_apart(
    secure_etcd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("hunter2")
    with pytest.raises(CoordinationError, match=r"login of user 'laminar': refused.*invalid user ID or password") as e:
        await access_from_config(secure_etcd, password_file=str(wrong)).connect().get("/k")
    assert "hunter2" not in str(e.value)
    monkeypatch.delenv("LAMINAR_ETCD_PASSWORD", raising=False)
    wrong.write_text("\n")
    for file, match in (("", "set the environment variable LAMINAR"), ("/no", "read from /no"), (wrong, "is empty")):
        await refused(access_from_config(secure_etcd, password_file=str(file)), ConfigError, match)
    await refused(access_from_config(secure_etcd, user=""), CoordinationError, "it asks for a user: set coordination")
    await refused(access_from_config(secure_etcd, user="guest"), CoordinationError, "permission denied")


async def test_in_the_clear_to_an_etcd_that_speaks_tls(secure_etcd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.workers.supervisor.run_etcd.REACH_ETCD_S", 1.0)
    with pytest.raises(ConfigError, match=r"no etcd answers.*if it speaks TLS, set coordination\.ca"):
        await reach(EtcdAccess((secure_etcd.endpoint,)))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('endpoints = ["a:1"]\ncertificate = "x.pem"', "belong together"),
        ('ca = "x.pem"', "give its endpoints"),
        ('endpoints = ["a:1"]\npassword = "hunter2"', "unknown key"),
        ('endpoints = ["a:1"]\npassword_env = "hunter2!"', "password_env"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_config(f'[model]\npath = "m"\n[coordination]\n{text}')


async def test_in_the_clear_and_with_tls_are_not_mixed(certificates: Path) -> None:
    mixed = EtcdAccess(("http://a:1", "b:1"), ca=str(certificates / "ca.pem"))
    with pytest.raises(ConfigError, match="asks for a connection in the clear, but TLS is set up"):
        mixed.connect()


def test_the_environment_of_a_host_overrules_paths_but_not_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINAR_ETCD_CA", "/here/ca.pem")
    monkeypatch.setenv("LAMINAR_ETCD_USER", "me")
    text = '[model]\npath = "m"\n[coordination]\nendpoints = ["a:1", "b:1"]\nca = "/there/ca.pem"'
    access = parse_config(text).coordination.access()
    assert access == EtcdAccess(("a:1", "b:1"), ca="/here/ca.pem", user="me")
    assert access.arguments() == ["--etcd", "a:1,b:1", "--etcd-ca", "/here/ca.pem", "--etcd-user", "me"]


@pytest.mark.parametrize("by", ["options", "environment"])
def test_the_command_joins_with_options_or_environment(secure_etcd: Any, by: str) -> None:
    """It gets as far as etcd's answer that there is no such run; the password is in no argument and no output."""
    access = access_from_config(secure_etcd)
    command = [sys.executable, "-m", "laminar.cli", "worker", "relay", "--run", "nowhere"]
    environment = {**os.environ, "LAMINAR_ETCD_PASSWORD": "secret"}
    if by == "options":
        command += ["--etcd", secure_etcd.endpoint, "--etcd-ca", access.ca, "--etcd-user", "laminar"]
    else:
        environment |= {
            "LAMINAR_ETCD": secure_etcd.endpoint,
            "LAMINAR_ETCD_CA": access.ca,
            "LAMINAR_ETCD_USER": "laminar",
        }
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "etcd knows no run 'nowhere'" in result.stderr and "secret" not in result.stderr + result.stdout


async def test_an_outage_is_not_taken_for_distrust(secure_etcd: Any) -> None:
    client = access_from_config(secure_etcd).connect(retry_s=20)
    await client.put("/k", "1")
    await secure_etcd.stop()
    reading = asyncio.create_task(client.get("/k"))
    await asyncio.sleep(0.5)
    with pytest.raises(CoordinationUnavailable):
        await client.transact(Transaction((), (Put("/k", "2"),)))
    await secure_etcd.start()
    kv = await reading
    assert kv and kv.value == "1"
    await client.close()
