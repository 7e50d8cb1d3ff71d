"""A relay and the processes of its host, over the real socket."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from laminar.errors import ConfigError, WeightsError
from laminar.relay import server as relay_server
from laminar.relay.client import AsyncRelayClient, MappedVersion, RelayConnection, RelayStatus
from laminar.relay.protocol import HEADER, MAX_FRAME, RelayUnavailable, encode
from laminar.relay.server import RelayServer
from laminar.relay.tensors import copy_into, layout_of, views

TENSORS = {"w": torch.randn(64, 33), "b": torch.randn(7).bfloat16()}
LAYOUT = layout_of(TENSORS)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RelayServer]:
    async with RelayServer(tmp_path / "relay.sock", run="demo", chunk_bytes=1024) as server:
        yield server
        server.holdings.validate()


@pytest.fixture
def client(server: RelayServer) -> AsyncRelayClient:
    return AsyncRelayClient(server.socket_path, run="demo")


async def publish(client: AsyncRelayClient, version: int, fill: float) -> str:
    arena = await client.reserve(LAYOUT)
    assert arena is not None
    copy_into(arena.buffer, LAYOUT, {name: torch.full_like(t, fill) for name, t in TENSORS.items()})
    return (await client.seal(arena, version)).digest


def filled_with(mapped: MappedVersion) -> float:
    tensors = views(mapped.buffer, mapped.layout)
    values = {float(v) for tensor in tensors.values() for v in tensor.unique()}
    assert len(values) == 1
    return values.pop()


async def until(client: AsyncRelayClient, condition: Callable[[RelayStatus], bool]) -> RelayStatus:
    for _ in range(500):
        status = await client.status()
        if condition(status):
            return status
        await asyncio.sleep(0.02)
    raise AssertionError(f"not so after 10 s: {status}")


async def test_what_was_published_is_what_is_opened(client: AsyncRelayClient) -> None:
    arena = await client.reserve(LAYOUT)
    assert arena is not None
    copy_into(arena.buffer, LAYOUT, TENSORS)
    info = await client.seal(arena, 0)
    with await client.open() as mapped:
        assert (mapped.version, mapped.digest, mapped.layout) == (0, info.digest, LAYOUT)
        mapped.verify()
        tensors = views(mapped.buffer, mapped.layout)
        assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
        del tensors


async def test_status_tells_versions_holds_arenas_and_errors(client: AsyncRelayClient) -> None:
    digest = await publish(client, 5, 1.0)
    await client.retain([5, 9])
    with await client.open(5):
        status = await client.status()
        held = status.versions[0]
        assert (status.run, status.newest, status.retained, status.errors) == ("demo", 5, (5, 9), ())
        assert (held.info.digest, held.info.layout_digest, held.info.bytes) == (
            digest,
            LAYOUT.digest,
            LAYOUT.total_bytes,
        )
        assert (held.holds, held.mapped) == (1, True)
        assert status.arenas["serving"] == 1
    status = await until(client, lambda s: s.versions[0].holds == 0)
    assert not status.versions[0].mapped


async def test_a_slow_reader_keeps_its_memory_while_four_newer_versions_are_published(client: AsyncRelayClient) -> None:
    """Case 8: a version still in use by a slow rollout, four newer ones published: its memory stays valid."""
    await publish(client, 1, 1.0)
    slow = await client.open(1)
    for version in range(2, 6):
        await publish(client, version, float(version))
    status = await client.status()
    assert [held.info.version for held in status.versions] == [4, 5]
    assert status.arenas["draining"] == 1
    slow.verify()
    assert filled_with(slow) == 1.0
    slow.close()
    assert (await until(client, lambda s: s.arenas["draining"] == 0)).arenas["serving"] == 2


async def test_slow_readers_of_many_versions_make_the_relay_skip_not_wait(client: AsyncRelayClient) -> None:
    slow = []
    for version in range(5):
        await publish(client, version, float(version))
        slow.append(await client.open(version))
    assert await client.reserve(LAYOUT) is None
    assert [filled_with(mapped) for mapped in slow] == [0.0, 1.0, 2.0, 3.0, 4.0]
    for mapped in slow:
        mapped.close()
    await until(client, lambda s: s.arenas["draining"] == 0)
    await publish(client, 5, 5.0)


async def test_a_sealed_version_cannot_be_changed(client: AsyncRelayClient, server: RelayServer) -> None:
    await publish(client, 1, 1.0)
    with await client.open(1) as mapped:
        assert mapped.buffer.readonly
    fd = server.holdings.get(1).arena.open_for_reading()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, prot=mmap.PROT_WRITE)
    os.close(fd)


async def test_views_that_are_still_alive_stop_a_seal_and_it_can_be_repeated(client: AsyncRelayClient) -> None:
    arena = await client.reserve(LAYOUT)
    assert arena is not None
    tensors = views(arena.buffer, LAYOUT)
    with pytest.raises(WeightsError, match="drop the tensors"):
        await client.seal(arena, 1)
    del tensors
    assert (await client.seal(arena, 1)).version == 1


async def test_a_second_mapping_of_the_writer_stops_the_seal(client: AsyncRelayClient, server: RelayServer) -> None:
    arena = await client.reserve(LAYOUT)
    assert arena is not None
    incoming = next(a for a in server.holdings.pool.arenas if not a.is_exclusive())
    stray = incoming.open_for_writing()
    with pytest.raises(WeightsError, match="still has its arena open or mapped"):
        await client.seal(arena, 1)
    assert (await client.status()).versions == ()
    os.close(stray)


async def test_another_digest_for_the_same_version_is_refused(client: AsyncRelayClient) -> None:
    digest = await publish(client, 3, 1.0)
    assert await publish(client, 3, 1.0) == digest
    with pytest.raises(WeightsError, match="one digest for ever"):
        await publish(client, 3, 2.0)
    with await client.open(3) as mapped:
        assert filled_with(mapped) == 1.0
    assert "one digest" in (await client.status()).errors[-1]


async def test_a_version_that_is_not_held_is_named_with_those_that_are(client: AsyncRelayClient) -> None:
    with pytest.raises(WeightsError, match="no version yet"):
        await client.open()
    await publish(client, 3, 1.0)
    with pytest.raises(WeightsError, match=r"does not hold version 4; it holds \[3\]"):
        await client.open(4)


async def test_an_abandoned_reservation_frees_its_arena(client: AsyncRelayClient) -> None:
    arena = await client.reserve(LAYOUT)
    assert arena is not None
    arena.abandon()
    status = await until(client, lambda s: s.arenas["incoming"] == 0)
    assert status.versions == ()


async def test_an_error_while_copying_is_the_error_that_is_seen(client: AsyncRelayClient) -> None:
    with pytest.raises(WeightsError, match="not in both"):
        arena = await client.reserve(LAYOUT)
        assert arena is not None
        with arena:
            copy_into(arena.buffer, LAYOUT, {"w": TENSORS["w"]})
    await until(client, lambda s: s.arenas["incoming"] == 0)


async def test_waiting_is_woken_by_a_publish_and_ends_at_its_deadline(client: AsyncRelayClient) -> None:
    assert await client.wait(-1, 0.05) is None
    assert await asyncio.to_thread(client.connection.wait, -1, 0.05) is None
    both = asyncio.gather(client.wait(0, 10), asyncio.to_thread(client.connection.wait, 0, 10.0))
    await publish(client, 0, 1.0)
    digest = await publish(client, 1, 1.0)
    assert [info.digest for info in await both if info is not None] == [digest, digest]


async def test_a_cancelled_wait_leaves_nothing_behind(client: AsyncRelayClient) -> None:
    task = asyncio.create_task(client.wait(-1, 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


PROCESS = """
import sys, time
from laminar.relay.client import RelayConnection
from laminar.relay.layout import Layout
connection = RelayConnection(sys.argv[1])
if sys.argv[2] == "write":
    arena = connection.reserve(Layout.from_tensors({"w": ("uint8", (8192,))}))
    arena.buffer[:4096] = b"x" * 4096
else:
    mapped = connection.open()
print("ready", flush=True)
time.sleep(60)
"""


async def started(server: RelayServer, role: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, str(server.socket_path), role, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
    return process


async def test_kill_minus_nine_of_a_writer_leaves_no_version_and_frees_the_arena(
    server: RelayServer, client: AsyncRelayClient
) -> None:
    process = await started(server, "write")
    assert (await client.status()).arenas["incoming"] == 1
    process.send_signal(signal.SIGKILL)
    await process.wait()
    status = await until(client, lambda s: s.arenas["incoming"] == 0 and s.arenas["draining"] == 0)
    assert status.versions == () and status.newest is None


async def test_a_stopped_writer_loses_its_reservation_but_its_memory_is_not_given_to_others(
    server: RelayServer, client: AsyncRelayClient
) -> None:
    """The connection ends while the writer still maps the arena: whatever it writes later, nobody reads."""
    arena = await client.reserve(LAYOUT)
    assert arena is not None
    arena._wire.close()
    await until(client, lambda s: s.arenas["draining"] == 1)
    for version in range(4):
        await publish(client, version, float(version))
        arena.buffer[:] = b"\xff" * LAYOUT.total_bytes
        with await client.open(version) as mapped:
            mapped.verify()
            assert filled_with(mapped) == version
    arena._unmap()


async def test_kill_minus_nine_of_a_reader_lets_go_of_its_version(
    server: RelayServer, client: AsyncRelayClient
) -> None:
    await publish(client, 1, 1.0)
    process = await started(server, "read")
    status = await client.status()
    assert (status.versions[0].holds, status.versions[0].mapped) == (1, True)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    status = await until(client, lambda s: s.versions[0].holds == 0)
    assert not status.versions[0].mapped


async def test_a_mapped_version_survives_its_relay_and_a_new_relay_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    client = AsyncRelayClient(path)
    async with RelayServer(path, chunk_bytes=1024):
        digest = await publish(client, 1, 1.0)
        mapped = await client.open()
        boot = (await client.status()).boot
    with pytest.raises(RelayUnavailable, match="is it running"):
        await client.status()
    with pytest.raises(RelayUnavailable):
        await client.wait(-1, 1)
    async with RelayServer(path, chunk_bytes=1024):
        status = await client.status()
        assert status.versions == () and status.boot != boot
        mapped.verify()
        arena = await client.reserve(mapped.layout)
        assert arena is not None
        arena.buffer[:] = mapped.buffer
        assert (await client.seal(arena, 1)).digest == digest, "offered again from a reader's memory"
    mapped.close()


async def test_a_relay_that_does_not_answer_meets_the_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "deaf.sock"))
        listener.listen()
        began = time.monotonic()
        with pytest.raises(RelayUnavailable, match="in time"):
            await asyncio.to_thread(RelayConnection(tmp_path / "deaf.sock", timeout=0.2).status)
        assert time.monotonic() - began < 2


async def test_a_client_of_another_run_is_refused(server: RelayServer) -> None:
    with pytest.raises(WeightsError, match="'demo', not of 'other'"):
        await AsyncRelayClient(server.socket_path, run="other").status()


async def test_the_socket_is_private_and_one_relay_serves_it(server: RelayServer, tmp_path: Path) -> None:
    assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="serves at"):
        await RelayServer(server.socket_path).start()
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        await RelayServer(open_folder / "r.sock").start()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"cannot be made: .* export XDG_RUNTIME_DIR=") as refused:
        await RelayServer(tmp_path / "file" / "r.sock").start()
    assert str(tmp_path / "file") in str(refused.value)
    with pytest.raises(ConfigError, match="the kernel allows 107"):
        RelayServer(tmp_path / ("x" * 120))
    (tmp_path / "file").write_text("not a socket")
    with pytest.raises(ConfigError, match="not a relay's socket"):
        await RelayServer(tmp_path / "file").start()
    assert (tmp_path / "file").read_text() == "not a socket"


async def test_a_socket_left_by_a_killed_relay_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "relay.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with RelayServer(path):
        assert (await AsyncRelayClient(path).status()).versions == ()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
async def test_another_user_is_refused(server: RelayServer) -> None:
    program = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "os.setuid(12345) if sys.argv[2] == 'before' else None\n"
        "s.connect(sys.argv[1])\n"
        "print(s.recv(1000))"
    )
    server.socket_path.chmod(0o666)
    shared = Path(tempfile.gettempdir())
    folders = [folder for folder in server.socket_path.parents if shared in folder.parents]
    modes = [folder.stat().st_mode for folder in folders]
    for folder in folders:
        folder.chmod(0o755)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(server.socket_path), "before", stdout=subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), 20)
    finally:
        for folder, mode in zip(folders, modes, strict=True):
            folder.chmod(mode)
    assert b"user 12345 may not use the relay" in output


async def test_who_says_nothing_is_closed(server: RelayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds one of few places until then, and gives no command that no hello came before."""
    monkeypatch.setattr(relay_server, "FRAME_TIMEOUT", 0.05)
    reader, writer = await asyncio.open_unix_connection(str(server.socket_path))
    try:
        assert await asyncio.wait_for(reader.read(), 20) == b""
    finally:
        writer.close()


HELLO = encode({"command": "hello", "protocol": 1, "run": "demo"})


def malformed(rng: random.Random) -> bytes:
    """One connection's worth of nonsense: raw bytes, torn or lying frames, wrong types, commands out of order."""
    good = [
        {"command": "status"},
        {"command": "reserve", "layout": LAYOUT.to_json()},
        {"command": "reserve", "layout": LAYOUT.to_json(), "writers": 3},
        {"command": "join", "ticket": "0" * 32},
        {"command": "wrote", "bytes": 1},
        {"command": "seal", "version": 3, "bytes": 1, "replaces": "0" * 64},
        {"command": "open", "version": None},
        {"command": "retain", "versions": [1]},
        {"command": "wait", "newer_than": -1, "timeout": 0.0},
    ]
    values = [
        None,
        True,
        -1,
        1 << 80,
        1.5,
        "x" * 100,
        [],
        [[]],
        {},
        {"tensors": [[1, 2, 3]]},
        {"tensors": [["a", "int8", [1 << 70], 0, 1]]},
    ]
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 200))
    if kind == 1:
        return HELLO + HEADER.pack(rng.choice([0, MAX_FRAME + 1, 0xFFFFFFFF, 1000])) + b"{}"
    if kind == 2:
        body = rng.choice([b"[" * 100_000, b'{"command":NaN}', b"\xff\xfe", b"9" * 5000, b"[]", b'"x"', b"{}"])
        return HELLO + HEADER.pack(len(body)) + body
    message = dict(rng.choice(good))
    if kind == 3:
        message[rng.choice(sorted(message))] = rng.choice(values)
        return HELLO + encode(message)
    if kind == 4:
        return encode(message)
    frames = bytearray(HELLO + encode(message))
    if kind == 5:
        return bytes(frames[: rng.randrange(1, len(frames))])
    for _ in range(rng.randrange(1, 4)):
        frames[rng.randrange(len(frames))] = rng.randrange(256)
    return bytes(frames)


@pytest.mark.parametrize("wrong", [{"version": "3"}, {"bytes": -1}, {"replaces": ["x"]}, {"replaces": "x" * 129}])
async def test_a_seal_that_cannot_be_read_costs_no_arena(
    server: RelayServer, client: AsyncRelayClient, wrong: dict[str, object]
) -> None:
    frames = [
        HELLO,
        encode({"command": "reserve", "layout": LAYOUT.to_json()}),
        encode({"command": "seal", "version": 3, **wrong}),
    ]
    for _ in range(3):
        await attack(server.socket_path, b"".join(frames))
    await until(client, lambda s: s.arenas["incoming"] == 0 and s.arenas["draining"] == 0)
    await publish(client, 3, 1.0)


async def attack(path: Path, data: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_a_thousand_malformed_conversations_end_in_refusals_and_the_relay_serves_on(
    server: RelayServer, client: AsyncRelayClient
) -> None:
    digest = await publish(client, 1, 1.0)
    rng = random.Random(7)
    for _ in range(1000):
        await attack(server.socket_path, malformed(rng))
    assert not [error for error in server.holdings.errors if "internal" in error]
    status = await until(client, lambda s: s.arenas["incoming"] == 0 and s.arenas["draining"] == 0)
    assert status.refusals > 300 and "refused a connection" in status.last_refusal
    assert not any("refused a connection" in error for error in status.errors), "errors are not pushed out by refusals"
    with await client.open(1) as mapped:
        assert mapped.digest == digest
        mapped.verify()
    await publish(client, 50, 2.0)


async def test_a_layout_that_is_not_canonical_is_refused_and_the_connection_lives_on(server: RelayServer) -> None:
    bad = LAYOUT.to_json()
    bad["tensors"][0][3] = 64
    reader, writer = await asyncio.open_unix_connection(str(server.socket_path))
    for message in (HELLO, encode({"command": "reserve", "layout": bad}), encode({"command": "status"})):
        writer.write(message)
    replies = [await reader.readexactly(HEADER.unpack(await reader.readexactly(4))[0]) for _ in range(3)]
    writer.close()
    assert b'"ok":true' in replies[0] and b"not canonical" in replies[1] and b'"ok":true' in replies[2]
