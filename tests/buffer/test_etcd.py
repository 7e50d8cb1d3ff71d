"""What only a real etcd has: users, certificates, names, a full database, lost data."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from laminar.buffer.coordination import Change, Delete, Listing, Put, Transaction
from laminar.buffer.etcd import EtcdCoordination, Tls, prefix_range
from laminar.buffer.etcd3_shim import rpc, serialized_descriptor
from laminar.buffer.etcd_access import parse_endpoint
from laminar.buffer.etcd_connection import EtcdConnection
from laminar.errors import ConfigError, CoordinationError, CoordinationFull, CoordinationUnavailable
from laminar.workers.supervisor.etcd_process import EtcdProcess, find_etcd


@asynccontextmanager
async def running(folder: Path, *flags: str) -> AsyncIterator[EtcdProcess]:
    etcd = EtcdProcess(folder / "etcd", flags=flags)
    await etcd.start()
    try:
        yield etcd
    finally:
        await etcd.stop()


class TestShim:
    def test_the_old_descriptors_are_found_in_both_of_their_spellings(self) -> None:
        assert serialized_descriptor(r"_b=1; D = F(name='x', serialized_pb=_b('\n\xff'))") == b"\n\xff"
        assert serialized_descriptor(r"D = F(serialized_pb=b'\n\xff')") == b"\n\xff"
        assert serialized_descriptor("DESCRIPTOR = pool.AddSerializedFile(b'x')") is None

    def test_messages_survive_the_wire(self) -> None:
        request = rpc.TxnRequest(success=[rpc.RequestOp(request_put=rpc.PutRequest(key=b"k", value=b"v", lease=7))])
        assert rpc.TxnRequest.FromString(request.SerializeToString()) == request
        assert rpc.Compare.CREATE == 1 and rpc.NOSPACE == 1


class TestEndpoints:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("10.0.0.1:2379", "10.0.0.1", 2379),
            ("http://node-1:2379/", "node-1", 2379),
            ("[::1]:2379", "::1", 2379),
        ],
    )
    def test_an_endpoint_is_a_host_and_a_port(self, text: str, host: str, port: int) -> None:
        assert parse_endpoint(text, tls=False) == (host, port)

    @pytest.mark.parametrize("text", ["", "node", "node:", "node:http", "node:99999", "ftp://node:1", "https://node:1"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="etcd endpoint"):
            parse_endpoint(text, tls=False)
        with pytest.raises(ConfigError, match="no etcd endpoint"):
            EtcdCoordination([])

    async def test_names_are_resolved_and_members_share_a_channel(self) -> None:
        connection = EtcdConnection(["localhost:1", "127.0.0.1:2"], timeout_s=1)
        targets = await connection._resolve(connection.endpoints)
        assert [t.address for t in targets] == ["ipv4:127.0.0.1:1,127.0.0.1:2"]
        secure = EtcdConnection(["localhost:1", "127.0.0.1:2"], timeout_s=1, tls=Tls())
        targets = await secure._resolve(secure.endpoints)
        assert [(t.address, t.name) for t in targets] == [
            ("ipv4:127.0.0.1:1", "localhost"),
            ("ipv4:127.0.0.1:2", "127.0.0.1"),
        ]

    async def test_an_unknown_name_is_an_unavailability_that_names_it(self) -> None:
        client = EtcdCoordination(["no-such-host.invalid:2379"], retry_s=0.2)
        with pytest.raises(CoordinationUnavailable, match=r"no-such-host\.invalid.*cannot be resolved"):
            await client.get("k")
        await client.close()

    async def test_one_dead_endpoint_of_two_does_no_harm(self, tmp_path: Path) -> None:
        async with running(tmp_path) as etcd:
            client = EtcdCoordination(["localhost:1", etcd.endpoint.replace("127.0.0.1", "localhost")])
            for i in range(20):
                await client.put("k", str(i))
                assert (await client.transact(Transaction((), (Put("k", "x"),)))).succeeded
            await client.close()

    def test_the_end_of_a_prefix(self) -> None:
        assert prefix_range("/a/") == (b"/a/", b"/a0")
        assert prefix_range("ü") == (b"\xc3\xbc", b"\xc3\xbd")
        assert prefix_range("") == (b"\0", b"\0")


class TestUsers:
    @staticmethod
    async def enable(etcd: EtcdProcess) -> None:
        async with grpc.aio.insecure_channel(etcd.endpoint) as channel:
            auth = rpc.AuthStub(channel)
            for user in ("root", "laminar"):
                await auth.UserAdd(rpc.AuthUserAddRequest(name=user, password="secret"))
            await auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
            await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
            await auth.AuthEnable(rpc.AuthEnableRequest())

    async def test_a_token_that_the_server_forgot_is_renewed_unseen(self, tmp_path: Path) -> None:
        async with running(tmp_path) as etcd:
            await self.enable(etcd)
            client = EtcdCoordination([etcd.endpoint], user="root", password="secret")
            await client.put("/k", "1")
            lease, _ = await client.grant(10)
            async with aclosing(client.watch("/")) as events:
                assert isinstance(await anext(events), Listing)
                client._connection._token_at -= 60
                await etcd.restart()  # its tokens live in memory
                await client.put("/k", "2")
                change = await asyncio.wait_for(anext(events), 10)
                assert isinstance(change, Change) and change.kv and change.kv.value == "2"
            client._connection._token = "forged"
            assert (await client.transact(Transaction((), (Put("/k", "3"),)))).succeeded
            assert await client.keep_alive(lease) > 0
            await client.close()

    async def test_a_wrong_password_and_a_missing_right_are_said(self, tmp_path: Path) -> None:
        async with running(tmp_path) as etcd:
            await self.enable(etcd)
            wrong = EtcdCoordination([etcd.endpoint], user="root", password="guess")
            with pytest.raises(CoordinationError, match=r"login of user 'root': refused.*invalid user ID or password"):
                await wrong.get("k")
            weak = EtcdCoordination([etcd.endpoint], user="laminar", password="secret")
            with pytest.raises(CoordinationError, match=r"put of k: refused.*permission denied"):
                await weak.put("k", "v")
            with pytest.raises(CoordinationError, match="permission denied"):
                await anext(weak.watch("/"))
            await asyncio.gather(wrong.close(), weak.close())


class TestTls:
    @pytest.fixture
    def certificates(self, tmp_path: Path) -> Path:
        """ca.pem; server and client .pem and .key, for the name `localhost`."""
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("needs the openssl command")

        def call(*arguments: str) -> None:
            subprocess.run([openssl, *arguments], cwd=tmp_path, check=True, capture_output=True)

        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        call(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test-ca", "-days", "2")
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
        (tmp_path / "names").write_text(names)
        for name in ("server", "client"):
            call(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            call(
                "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-days", "2", "-extfile", "names",
            )  # fmt: skip
        return tmp_path

    async def test_both_sides_show_their_certificates(self, tmp_path: Path, certificates: Path) -> None:
        at = {name: str(certificates / name) for name in ("ca.pem", "client.pem", "client.key")}
        async with running(tmp_path) as etcd:
            await etcd.stop()
            url = f"https://{etcd.endpoint}"
            secure = await asyncio.create_subprocess_exec(
                *[
                    str(find_etcd()), "--data-dir", str(tmp_path / "secure"), "--listen-client-urls", url,
                    "--advertise-client-urls", url, "--listen-peer-urls", f"http://127.0.0.1:{etcd.peer_port}",
                    "--cert-file", "server.pem", "--key-file", "server.key", "--client-cert-auth",
                    "--trusted-ca-file", "ca.pem",
                ],
                cwd=certificates, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                tls = Tls(at["ca.pem"], at["client.pem"], at["client.key"])
                dead_and_named = ["https://127.0.0.1:1", f"https://localhost:{etcd.client_port}"]
                client = EtcdCoordination(dead_and_named, tls=tls)
                await client.put("k", "v")
                kv = await client.get("k")
                assert kv and kv.value == "v"
                anonymous = EtcdCoordination([etcd.endpoint], tls=Tls(at["ca.pem"]), retry_s=0.5)
                with pytest.raises(CoordinationUnavailable):
                    await anonymous.get("k")
                await asyncio.gather(client.close(), anonymous.close())
            finally:
                secure.terminate()
                await secure.wait()

    def test_a_missing_file_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"/nowhere/ca\.pem cannot be read"):
            Tls("/nowhere/ca.pem").credentials()
        with pytest.raises(ConfigError, match="certificate and its key"):
            Tls(certificate="x").credentials()


async def fill(client: EtcdCoordination) -> CoordinationFull:
    with pytest.raises(CoordinationFull) as caught:
        for _ in range(500):  # the size is counted at commits, each 100 ms
            await client.put("k", "x" * 200_000)
    return caught.value


async def test_a_full_database_is_said_with_the_remedy_and_can_be_freed(tmp_path: Path) -> None:
    async with running(tmp_path, "--quota-backend-bytes", str(4 << 20)) as etcd:
        client = EtcdCoordination([etcd.endpoint], retry_s=0.5)
        lease, _ = await client.grant(60)
        message = str(await fill(client))
        assert f"the space quota of etcd at {etcd.endpoint} is exhausted, it takes no writes" in message
        assert await client.keep_alive(lease) > 0, "those who hold a lease keep it"
        assert await client.get("k")
        status = await client.status()
        assert status["version"] and int(status["db_size"]) > 2 << 20 and status["leader"] == status["member"]
        assert await client.full_members() == [status["member"]]
        await client.compact(int(status["revision"]))
        await client.compact(int(status["revision"]))
        await client.defragment()
        after = await client.status()
        assert int(after["in_use"]) <= int(after["db_size"]) < int(status["db_size"])
        assert await client.full_members() == []
        await client.put("k", "fits again")
        with pytest.raises(CoordinationError, match="future revision"):
            await client.compact(1_000_000)
        await client.close()


@pytest.mark.skipif(shutil.which("etcdctl") is None, reason="the message's commands are etcdctl's")
async def test_the_commands_in_the_message_free_the_database(tmp_path: Path) -> None:
    async with running(tmp_path, "--quota-backend-bytes", str(4 << 20)) as etcd:
        client = EtcdCoordination([etcd.endpoint], retry_s=0.5)
        message = str(await fill(client))
        commands = message.split("type: ")[1].split(" (if it is full")[0]
        process = await asyncio.create_subprocess_exec("sh", "-ec", commands, stdout=asyncio.subprocess.DEVNULL)
        assert await process.wait() == 0
        await client.put("k", "fits again")
        await client.close()


async def test_a_watch_notices_that_etcd_was_set_up_anew(tmp_path: Path) -> None:
    """Else it would wait in silence for the revisions of an etcd that no longer exists."""
    async with running(tmp_path) as etcd:
        client = EtcdCoordination([etcd.endpoint])
        for i in range(50):
            await client.put(f"/{i % 3}", str(i))
        await client.transact(Transaction((), (Delete("/2"),)))
        async with aclosing(client.watch("/")) as events:
            first = await anext(events)
            assert isinstance(first, Listing) and len(first.snapshot.items) == 2
            await etcd.stop()
            shutil.rmtree(etcd.data_dir)
            await etcd.start()
            again = await asyncio.wait_for(anext(events), 10)
            assert isinstance(again, Listing) and not again.snapshot.items
            await client.put("/new", "1")
            change = await asyncio.wait_for(anext(events), 10)
            assert isinstance(change, Change) and change.key == "/new"
        await client.close()


async def test_a_call_under_way_when_the_client_is_closed_is_an_unavailability(tmp_path: Path) -> None:
    """gRPC would show it as a cancellation, which tears down whoever waits."""
    async with running(tmp_path) as etcd:
        client = EtcdCoordination([etcd.endpoint])
        watch = client.watch("/")
        await anext(watch)
        waiting = asyncio.create_task(anext(watch))  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        await client.close()
        with pytest.raises(CoordinationError, match="closed"):
            await waiting
        assert not waiting.cancelled()


async def test_a_cancelled_call_is_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path) as etcd:
        client = EtcdCoordination([etcd.endpoint])
        watch = client.watch("/")
        await anext(watch)
        waiting = asyncio.create_task(anext(watch))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.close()
