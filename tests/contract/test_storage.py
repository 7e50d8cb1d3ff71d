"""What every storage promises, and what each adds."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer import local_files
from laminar.buffer.segments import SegmentWriter, load_segment
from laminar.buffer.storage import (
    AlreadyExists,
    FsspecStorage,
    LocalStorage,
    MemoryStorage,
    NotFound,
    Storage,
    StorageFull,
    open_storage,
)
from laminar.errors import ConfigError, StoreError

KINDS = ["local", "object store", "s3", "twin", "twin without append"]


def s3_storage(service: Any) -> FsspecStorage:
    return FsspecStorage(f"{service.bucket()}/a/prefix", service.options)


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    makers: dict[str, Callable[[], Storage]] = {
        "local": lambda: LocalStorage(tmp_path / "store"),
        "object store": lambda: FsspecStorage(f"memory://{uuid.uuid4().hex}"),
        "s3": lambda: s3_storage(request.getfixturevalue("s3_service")),
        "twin": MemoryStorage,
        "twin without append": lambda: MemoryStorage(supports_append=False),
    }
    return makers[request.param]()


async def test_what_is_written_is_read_back(storage: Storage) -> None:
    await storage.write("a/b/c.arrow", b"\x00\xff" * 1000)
    assert await storage.read("a/b/c.arrow") == b"\x00\xff" * 1000
    assert await storage.exists("a/b/c.arrow")
    assert not await storage.exists("a/b")


async def test_a_file_is_published_only_once_unless_asked_otherwise(storage: Storage) -> None:
    await storage.write("batches/1.arrow", b"first")
    with pytest.raises(AlreadyExists, match=r"batches/1\.arrow"):
        await storage.write("batches/1.arrow", b"second")
    assert await storage.read("batches/1.arrow") == b"first"
    await storage.write("batches/1.arrow", b"third", overwrite=True)
    assert await storage.read("batches/1.arrow") == b"third"


async def test_of_many_writers_of_one_file_exactly_one_wins(storage: Storage) -> None:
    results = await asyncio.gather(
        *(storage.write("one", str(i).encode() * 10_000) for i in range(12)), return_exceptions=True
    )
    winners = [i for i, r in enumerate(results) if r is None]
    assert len(winners) == 1
    assert all(isinstance(r, AlreadyExists) for r in results if r is not None)
    assert await storage.read("one") == str(winners[0]).encode() * 10_000


async def test_a_missing_file_is_named(storage: Storage) -> None:
    with pytest.raises(NotFound, match="nowhere/at-all") as caught:
        await storage.read("nowhere/at-all")
    assert isinstance(caught.value, FileNotFoundError) and isinstance(caught.value, StoreError)


async def test_listing_is_of_a_folder_and_all_below(storage: Storage) -> None:
    for path in ("partials/w1/0.arrows", "partials/w1/deep/1.arrows", "partials/w10/0.arrows", "run.json"):
        await storage.write(path, b"12345")
    assert [f.path for f in await storage.list("partials/w1")] == ["partials/w1/0.arrows", "partials/w1/deep/1.arrows"]
    assert [f.path for f in await storage.list("partials/w1/")] == ["partials/w1/0.arrows", "partials/w1/deep/1.arrows"]
    assert len(await storage.list("")) == 4
    assert await storage.list("nothing") == []
    info = (await storage.list("partials/w10"))[0]
    assert info.size == 5 and info.modified_us > 1_500_000_000_000_000


async def test_deleting_is_idempotent(storage: Storage) -> None:
    await storage.write("partials/w1/0.arrows", b"x")
    await storage.write("partials/w1/1.arrows", b"x")
    await storage.write("partials/w2/0.arrows", b"x")
    for _ in range(2):
        await storage.delete("partials/w1/0.arrows")
        await storage.delete_tree("partials/w1")
    assert [f.path for f in await storage.list("")] == ["partials/w2/0.arrows"]


async def test_no_path_leaves_the_root(storage: Storage) -> None:
    for path in ("../outside", "a/../../b", "a//b", "a/./b"):
        with pytest.raises(StoreError, match="below the store's root"):
            await storage.write(path, b"")
    with pytest.raises(StoreError, match="root"):
        await storage.delete_tree("")


async def test_appends_add_up_or_are_refused(storage: Storage) -> None:
    if not storage.supports_append:
        with pytest.raises(StoreError, match="whole objects only"):
            await storage.append("log", b"a", sync=True)
        return
    for piece in (b"a", b"bc", b"", b"def"):
        await storage.append("logs/w/0", piece, sync=True)
    assert await storage.read("logs/w/0") == b"abcdef"


async def test_a_storage_is_probed_before_it_is_relied_upon(storage: Storage) -> None:
    await storage.probe()
    assert await storage.list("") == []


async def test_a_store_without_conditional_put_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FsspecStorage(f"memory://{uuid.uuid4().hex}")
    put = storage._fs.pipe_file
    monkeypatch.setattr(storage._fs, "pipe_file", lambda key, data, mode: put(key, data))
    with pytest.raises(StoreError, match="no conditional put"):
        await storage.probe()


class TestS3:
    async def test_a_segment_is_a_sequence_of_objects_with_the_same_rows(self, s3_service: Any) -> None:
        storage = s3_storage(s3_service)
        schema = pa.schema([("number", pa.int64())])
        writer = SegmentWriter(storage, "partials/w/000000.arrows", schema, sync=True)
        for i in range(40):
            await writer.append(pa.record_batch([pa.array([i], pa.int64())], schema=schema))
        await writer.close()
        files = await storage.list("partials/w")
        assert [f.path for f in files[:2]] == ["partials/w/000000-000000.arrows", "partials/w/000000-000001.arrows"]
        contents = await load_segment(storage, "partials/w/000000.arrows", schema, files)
        assert [b["number"][0].as_py() for b in contents.batches] == list(range(40))
        await storage.delete(files[7].path)
        left = [f for f in files if f != files[7]]
        cut = await load_segment(storage, "partials/w/000000.arrows", schema, left)
        assert len(cut.batches) == 7 and cut.damage and "object 7 is missing" in cut.damage

    async def test_a_put_whose_answer_was_lost_is_recognised_as_ours(
        self, s3_service: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The client repeats the request, and finds the object that its first attempt has made."""
        storage = s3_storage(s3_service)
        put = storage._fs.pipe_file

        def twice(key: str, data: bytes, **options: Any) -> None:
            put(key, data, **options)
            put(key, data, **options)

        monkeypatch.setattr(storage._fs, "pipe_file", twice)
        await storage.write("batches/1.arrow", b"mine")
        with pytest.raises(AlreadyExists):
            await storage.write("batches/1.arrow", b"mine")
        assert await storage.read("batches/1.arrow") == b"mine"

    async def test_two_puts_at_once_are_tried_again(self, s3_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """AWS answers 409 to one of two conditional puts that overlap, whether or not the other succeeds."""
        from botocore.exceptions import ClientError

        storage = s3_storage(s3_service)
        put, conflicts = storage._fs.pipe_file, [0]

        def overlapping(key: str, data: bytes, **options: Any) -> None:
            conflicts[0] += 1
            if conflicts[0] <= 2:
                answer = {
                    "Error": {"Code": "ConditionalRequestConflict"},
                    "ResponseMetadata": {"HTTPStatusCode": 409},
                }
                raise OSError(errno.EBUSY, "conflict") from ClientError(answer, "PutObject")  # type: ignore[arg-type]
            put(key, data, **options)

        monkeypatch.setattr(storage._fs, "pipe_file", overlapping)
        await storage.write("one", b"x")
        assert conflicts == [3] and await storage.read("one") == b"x"

    async def test_a_service_that_ignores_the_condition_is_refused_with_the_remedy(
        self, s3_service: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = s3_storage(s3_service)
        put = storage._fs.pipe_file
        monkeypatch.setattr(storage._fs, "pipe_file", lambda key, data, **options: put(key, data))
        with pytest.raises(StoreError, match=r"no conditional put.*use a store that honours If-None-Match"):
            await storage.probe()

    async def test_what_is_missing_is_said(self, s3_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StoreError, match="its bucket does not exist; create it"):
            await FsspecStorage("s3://no-such-bucket/x", s3_service.options).write("a", b"")
        nobody = FsspecStorage("s3://b/x", {"endpoint_url": "http://127.0.0.1:1", "region": "r"})
        with pytest.raises(StoreError, match=r"127\.0\.0\.1:1 is not reached: check storage\.endpoint_url"):
            await nobody.read("a")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        # Another region: clients are shared by equal settings, and this one has found its keys already.
        keyless = FsspecStorage(s3_service.bucket(), {**s3_service.options, "region": "eu-west-1"})
        with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID"):
            await keyless.read("a")

    def test_the_environment_names_the_service_and_keys_never_stand_in_its_address(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
        monkeypatch.setenv("AWS_REGION", "there")
        storage = FsspecStorage("s3://bucket/prefix")
        assert storage.table_options["aws_endpoint"] == "http://minio:9000"
        assert (storage.table_options["aws_region"], storage.table_options["allow_http"]) == ("there", "true")
        assert storage.absolute("a/b.lance") == "s3://bucket/prefix/a/b.lance"
        with pytest.raises(ConfigError, match="holds a user or password") as caught:
            FsspecStorage("s3://bucket", {"endpoint_url": "http://me:hunter2@minio:9000"})
        assert "hunter2" not in str(caught.value)
        with pytest.raises(ConfigError, match="no address of an S3 service"):
            FsspecStorage("s3://bucket", {"endpoint_url": "minio:9000"})
        with pytest.raises(ConfigError, match="for s3:// stores"):
            open_storage("memory2://bucket", {"endpoint_url": "http://minio:9000"})


def test_a_url_decides_the_storage(tmp_path: Path) -> None:
    assert open_storage(str(tmp_path)).absolute("a/b") == f"{tmp_path}/a/b"
    assert open_storage(f"file://{tmp_path}").absolute("a") == f"{tmp_path}/a"
    assert open_storage(f"{tmp_path}").local
    with pytest.raises(ConfigError, match="vanish"):
        open_storage("memory://x")
    with pytest.raises(ConfigError, match="nonsense"):
        open_storage("nonsense://x")


async def test_a_full_disk_is_told_with_its_numbers_and_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    await storage.append("log", b"before", sync=False)

    def half_then_full(handle: int, data: bytes) -> None:
        os.write(handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_files, "_write_all", half_then_full)
    with pytest.raises(StorageFull, match=r"no space for 5000 bytes, \d+ bytes are free"):
        await storage.append("log", b"x" * 5000, sync=False)
    with pytest.raises(StorageFull):
        await storage.append("new", b"x" * 5000, sync=False)
    with pytest.raises(StorageFull):
        await storage.write("whole", b"x" * 5000)
    assert [f.path for f in await storage.list("")] == ["log"]
    assert await storage.list("", temporary=True) == []
    assert await storage.read("log") == b"before"


async def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="no hard links"):
        await LocalStorage(tmp_path).probe()


async def test_no_file_locks_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 64: on a file system without locks (ENOLCK) everything works, since no lock is asked for."""
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, no_locks)
    storage = LocalStorage(tmp_path)
    await storage.write("a", b"1")
    await storage.append("b", b"2", sync=True)
    assert len(await storage.list("")) == 2


WRITER = """
import asyncio, sys
from laminar.buffer.storage import LocalStorage
async def main():
    storage = LocalStorage(sys.argv[1])
    n = 0
    while True:
        await storage.write("file", str(n % 10).encode() * 2_000_000, overwrite=True)
        if n == 3:
            print("going", flush=True)
        n += 1
asyncio.run(main())
"""


async def test_a_killed_writer_leaves_the_file_whole_and_its_stump_findable(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for _ in range(3):
        writer = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        await asyncio.to_thread(writer.stdout.readline)
        await asyncio.sleep(0.013)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = await storage.read("file")
        assert len(data) == 2_000_000 and len(set(data)) == 1
    assert [f.path for f in await storage.list("")] == ["file"]
    for stump in await storage.list("", temporary=True):
        await storage.delete(stump.path)
    assert os.listdir(tmp_path) == ["file"]


async def test_the_twin_loses_at_a_power_cut_what_was_not_synced() -> None:
    storage = MemoryStorage()
    await storage.append("log", b"synced", sync=True)
    await storage.append("log", b"0123456789", sync=False)
    await storage.append("new", b"never", sync=False)
    storage.crash(keep_unsynced=0.5)
    assert await storage.read("log") == b"synced01234"
    await storage.append("log", b"56", sync=False)
    storage.crash(zeroed=True)
    assert await storage.read("log") == b"synced" + bytes(7)


async def test_the_twin_runs_full_and_refuses_when_told() -> None:
    storage = MemoryStorage()
    storage.capacity = 10
    await storage.write("a", b"12345678")
    with pytest.raises(StorageFull, match="no space for 3 bytes, 2 bytes are free"):
        await storage.append("b", b"123", sync=True)
    assert not await storage.exists("b") and await storage.free_bytes() == 2

    def fault(verb: str, path: str) -> None:
        raise StoreError(f"{verb} {path} failed")

    storage.fault = fault
    with pytest.raises(StoreError, match="read a failed"):
        await storage.read("a")
