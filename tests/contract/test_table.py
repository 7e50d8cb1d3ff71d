"""What a committed table promises, on Lance and in its twin."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from laminar.buffer.lance_files import TableFiles
from laminar.buffer.lance_table import LanceTable
from laminar.buffer.schema import STEPS
from laminar.buffer.storage import FsspecStorage
from laminar.buffer.table import MemoryTable, Table, TableUnreadable, TargetTaken
from laminar.errors import StoreError


def rows(first: int, count: int = 4) -> pa.Table:
    return pa.Table.from_pylist(
        [{"step": i // 2, "group": i // 2, "sample": i % 2, "advantage": i / 8, "commit_seq": i, "tokens": 7}
         for i in range(first, first + count)],
        schema=STEPS,
    )  # fmt: skip


def lance_table(tmp_path: Path) -> LanceTable:
    return LanceTable(str(tmp_path / "steps.lance"), STEPS, fsync=True)


Handles = Callable[[], LanceTable]
"""Makes handles of their own to one table."""


@pytest.fixture(params=["folder", "s3"])
def lance_handle(request: pytest.FixtureRequest, tmp_path: Path) -> Handles:
    if request.param == "folder":
        return lambda: lance_table(tmp_path)
    service = request.getfixturevalue("s3_service")
    storage = FsspecStorage(service.bucket(), service.options)
    return lambda: LanceTable(
        storage.absolute("steps.lance"), STEPS, fsync=True, storage_options=storage.table_options
    )


@pytest.fixture(params=["lance", "lance on s3", "twin"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    if request.param == "lance on s3":
        service = request.getfixturevalue("s3_service")
        storage = FsspecStorage(service.bucket(), service.options)
        return LanceTable(storage.absolute("steps.lance"), STEPS, fsync=True, storage_options=storage.table_options)
    return lance_table(tmp_path) if request.param == "lance" else MemoryTable(STEPS)


async def fill(table: Table, commits: int) -> None:
    for i in range(commits):
        assert await table.commit(rows(4 * i), target=await table.version() + 1, key=f"key-{i}") == i + 1


async def test_a_table_that_nobody_made_is_empty(table: Table) -> None:
    assert await table.version() == 0
    assert await table.count() == 0
    assert await table.find("key") is None
    assert (await table.read(["step"])).schema.names == ["step"]
    assert (await table.scan_since(-1)).num_rows == 0
    assert await table.compact(keep=3) == 0


async def test_commits_make_versions_from_one_on(table: Table) -> None:
    await fill(table, 3)
    assert await table.version() == 3
    assert await table.count() == 12
    assert (await table.read())["commit_seq"].to_pylist() == list(range(12))
    assert (await table.read()).schema.equals(STEPS)


async def test_a_commit_becomes_its_target_or_adds_nothing(table: Table) -> None:
    with pytest.raises(TargetTaken, match=r"'early' .* version 2, the next one is 1"):
        await table.commit(rows(0), target=2, key="early")
    await fill(table, 2)
    for target in (1, 2, 4):
        with pytest.raises(TargetTaken, match="the next one is 3"):
            await table.commit(rows(50), target=target, key="late")
    assert await table.count() == 8 and await table.find("late") is None


async def test_a_commit_is_found_by_its_key(table: Table) -> None:
    await fill(table, 5)
    assert [await table.find(f"key-{i}") for i in range(5)] == [1, 2, 3, 4, 5]
    assert await table.find("key-1", within=3) is None
    assert await table.find("key-2", within=3) == 3
    assert await table.find("another") is None


async def test_the_same_rows_are_not_committed_twice(table: Table) -> None:
    """Case 28: a completion that is delivered twice is one row, since a retry looks for its key and its target."""
    await fill(table, 1)
    await table.commit(rows(4), target=2, key="delivery")
    with pytest.raises(TargetTaken):
        await table.commit(rows(4), target=2, key="delivery")
    assert await table.find("delivery") == 2 and await table.count() == 8


async def test_of_many_committers_of_one_target_one_wins(table: Table) -> None:
    await fill(table, 1)
    results = await asyncio.gather(
        *(table.commit(rows(10 * i), target=2, key=f"rival-{i}") for i in range(6)), return_exceptions=True
    )
    assert results.count(2) == 1
    assert all(r == 2 or isinstance(r, TargetTaken) for r in results)
    assert await table.count() == 8
    assert await table.find(f"rival-{results.index(2)}") == 2


async def test_columns_filters_and_limits(table: Table) -> None:
    await fill(table, 3)
    wanted = await table.read(["sample", "group"], filter="group IN (1, 4) AND sample = 0")
    assert wanted.schema.names == ["sample", "group"]
    assert sorted(wanted["group"].to_pylist()) == [1, 4]
    assert (await table.read(filter="`group` = 2", limit=1)).num_rows == 1
    assert (await table.read(limit=5)).num_rows == 5
    with pytest.raises(Exception, match="nonsense"):
        await table.read(filter="nonsense = 1")


async def test_a_scan_goes_on_where_the_last_one_ended(table: Table) -> None:
    await fill(table, 2)
    assert (await table.scan_since(-1, ["group"]))["commit_seq"].to_pylist() == list(range(8))
    await table.commit(rows(8), target=3, key="more")
    assert (await table.scan_since(7, ["commit_seq", "sample"])).to_pydict() == {
        "commit_seq": [8, 9, 10, 11],
        "sample": [0, 1, 0, 1],
    }
    assert (await table.scan_since(11)).num_rows == 0


async def test_compaction_keeps_every_row_and_the_newest_versions(table: Table) -> None:
    await fill(table, 20)
    before = await table.read()
    version = await table.compact(keep=2)
    assert version == await table.version() > 20
    assert (await table.read()).equals(before) and await table.count() == 80
    assert await table.find("key-1") is None
    assert await table.commit(rows(80), target=version + 1, key="after") == version + 1
    assert await table.count() == 84 and await table.find("after") == version + 1


async def test_a_commit_that_was_announced_before_a_compaction_is_refused(table: Table) -> None:
    await fill(table, 3)
    await table.compact(keep=10)
    with pytest.raises(TargetTaken):
        await table.commit(rows(12), target=4, key="announced")
    assert await table.count() == 12


async def test_rows_of_another_shape_are_refused(table: Table) -> None:
    with pytest.raises(StoreError, match="do not fit"):
        await table.commit(pa.table({"step": [1]}), target=1, key="k")


# -- Lance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["commit", "compaction", "commits that were cleaned up"])
async def test_a_late_committer_is_refused_whatever_came_between(
    lance_handle: Handles, tmp_path: Path, between: str
) -> None:
    """Lance itself rebases a late append, and its rows are there twice."""
    table, late = lance_handle(), lance_handle()
    await fill(table, 3)
    written = late.files.sync_data

    def overtaken(fragments: list[object]) -> None:
        written(fragments)
        late.files.sync_data = written  # type: ignore[method-assign]
        if between != "compaction":
            asyncio.run(table.commit(rows(12), target=4, key="same rows"))
        if between != "commit":
            asyncio.run(table.compact(keep=1))

    late.files.sync_data = overtaken  # type: ignore[method-assign, assignment]
    with pytest.raises(TargetTaken, match=r"version 4, the next one is \d"):
        await late.commit(rows(12), target=4, key="late")
    expected = list(range(12 if between == "compaction" else 16))
    assert sorted((await table.read())["commit_seq"].to_pylist()) == expected
    assert await late.find("late") is None
    if between == "commit" and table.files.local:
        assert len(os.listdir(tmp_path / "steps.lance/data")) == 4, "the refused commit's file is gone"


async def test_a_late_compaction_gives_way_to_a_commit(lance_handle: Handles) -> None:
    table, late = lance_handle(), lance_handle()
    await fill(table, 3)
    rewritten = late._rewritten

    def overtaken(base: object) -> object:
        result = rewritten(base)
        asyncio.run(table.commit(rows(12), target=4, key="between"))
        return result

    late._rewritten = overtaken  # type: ignore[method-assign, assignment]
    assert await late.compact(keep=10) == 4
    assert await table.find("between") == 4
    assert (await table.read())["commit_seq"].to_pylist() == list(range(16))


async def test_a_commit_whose_reply_was_lost_is_recognised(
    lance_handle: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lance_handle()
    await fill(table, 1)

    made = table._publish

    def cut(*operation: Any) -> None:
        made(*operation)
        raise OSError("the answer never came")

    with monkeypatch.context() as patch:
        patch.setattr(table, "_publish", cut)
        assert await table.commit(rows(4), target=2, key="k") == 2
    assert await table.count() == 8


async def test_a_commit_is_not_acknowledged_nor_found_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would take its rows, when whoever asked has deleted the segments that they came from."""
    table, successor = lance_table(tmp_path), lance_table(tmp_path)
    await fill(table, 1)
    with monkeypatch.context() as patch:
        patch.setattr(TableFiles, "sync_manifests", failing(OSError(5, "Input/output error")))
        with pytest.raises(StoreError, match="Input/output error"):
            await table.commit(rows(4), target=2, key="k")
        with pytest.raises(StoreError, match="Input/output error"):
            await successor.find("k")
    synced: list[int] = []
    monkeypatch.setattr(TableFiles, "sync_manifests", lambda self, since: synced.append(since))
    assert await successor.find("k") == 2 and synced == [2]


def failing(error: Exception, times: int = 1000) -> Callable[..., Any]:
    """Raises the error so many times, and then answers None."""
    left = [error] * times

    def call(*arguments: Any, **options: Any) -> None:
        if left:
            raise left.pop()

    return call


@pytest.mark.parametrize("times", [1, 1000])
async def test_a_compaction_that_was_made_keeps_its_data_whatever_fails_after_it(tmp_path: Path, times: int) -> None:
    table = lance_table(tmp_path)
    await fill(table, 3)
    table.files.sync_manifests = failing(OSError(5, "Input/output error"), times)  # type: ignore[method-assign]
    if times == 1:
        assert await table.compact(keep=1) == 4
    else:
        with pytest.raises(StoreError, match="Input/output error"):
            await table.compact(keep=1)
        assert len(table.files.manifests()) == 4, "no old version goes before the new one is durable"
    assert (await lance_table(tmp_path).read())["commit_seq"].to_pylist() == list(range(12))


@pytest.mark.parametrize("instant", ["sync_data", "_publish"])
async def test_a_compaction_that_failed_leaves_no_files_behind(tmp_path: Path, instant: str) -> None:
    table = lance_table(tmp_path)
    await fill(table, 3)
    where: Any = table.files if instant == "sync_data" else table
    real = getattr(where, instant)
    setattr(where, instant, failing(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="no space"):
        await table.compact(keep=10)
    setattr(where, instant, real)
    assert await table.commit(rows(12), target=4, key="after") == 4
    assert len(os.listdir(tmp_path / "steps.lance/data")) == 4
    assert (await table.read())["commit_seq"].to_pylist() == list(range(16))


async def test_rivals_in_handles_of_their_own_never_both_win(lance_handle: Handles) -> None:
    handles = [lance_handle() for _ in range(3)]
    for target in range(1, 16):
        results = await asyncio.gather(
            *(h.commit(rows(target), target=target, key=f"{target}-{i}") for i, h in enumerate(handles)),
            return_exceptions=True,
        )
        winner = results.index(target)
        assert results.count(target) == 1, results
        assert await handles[0].find(f"{target}-{winner}") == target
    assert await handles[0].count() == 60


COMMITTER = """
import asyncio, json, sys, time
import pyarrow as pa
from laminar.buffer.lance_table import LanceTable
from laminar.buffer.schema import STEPS

def stand_still(*_):
    print("there", flush=True)
    time.sleep(600)

async def main():
    table = LanceTable(sys.argv[1], STEPS, fsync=True, storage_options=json.loads(sys.argv[2]))
    setattr(table.files, sys.argv[3], stand_still)
    rows = pa.Table.from_pylist([{"step": 9, "group": 9, "sample": i, "commit_seq": 4 + i} for i in range(4)], STEPS)
    await table.commit(rows, target=2, key="of the dead")
asyncio.run(main())
"""


@pytest.mark.parametrize("instant", ["sync_data", "sync_manifests"])
async def test_a_committer_killed_within_a_commit_on_s3_leaves_all_or_nothing(s3_service: Any, instant: str) -> None:
    """Killed before its manifest is there, its commit is made by the successor; killed after it, it is recognised."""
    storage = FsspecStorage(s3_service.bucket(), s3_service.options)
    table = LanceTable(storage.absolute("steps.lance"), STEPS, fsync=True, storage_options=storage.table_options)
    await fill(table, 1)
    arguments = [sys.executable, "-c", COMMITTER, table.uri, json.dumps(storage.table_options), instant]
    killed = subprocess.Popen(arguments, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert killed.stdout is not None
    assert await asyncio.to_thread(killed.stdout.readline) == b"there\n"
    killed.kill()
    killed.wait()
    killed.stdout.close()
    made = await table.find("of the dead")
    assert made == (2 if instant == "sync_manifests" else None)
    if made is None:
        assert await table.commit(rows(4), target=2, key="of the dead") == 2
    with pytest.raises(TargetTaken):
        await table.commit(rows(4), target=2, key="of the dead")
    assert sorted((await table.read())["commit_seq"].to_pylist()) == list(range(8))


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "damage", [lambda d: b"", half, lambda d: bytes(len(d)), lambda d: d[:20] + bytes(len(d) - 60) + d[-40:]]
)
@pytest.mark.parametrize("commits", [1, 3])
async def test_an_unreadable_newest_manifest_is_set_aside(
    tmp_path: Path, damage: Callable[[bytes], bytes], commits: int
) -> None:
    """A power cut may leave one; Lance opens a zeroed one as an empty table of version 0 without a word."""
    await fill(lance_table(tmp_path), commits)
    newest = min((tmp_path / "steps.lance/_versions").glob("*.manifest"))
    newest.write_bytes(damage(newest.read_bytes()))
    table = lance_table(tmp_path)
    assert await table.version() == commits - 1
    assert await table.count() == 4 * (commits - 1)
    assert await table.commit(rows(4 * commits), target=commits, key="again") == commits
    assert await table.find("again") == commits and await table.count() == 4 * commits


async def test_a_running_reader_follows_when_a_manifest_is_set_aside(tmp_path: Path) -> None:
    table, reader = lance_table(tmp_path), lance_table(tmp_path)
    await fill(table, 3)
    assert await reader.count() == 12
    newest = min((tmp_path / "steps.lance/_versions").glob("*.manifest"))
    newest.write_bytes(b"")
    restarted = lance_table(tmp_path)
    assert await restarted.version() == 2
    assert await restarted.commit(rows(50, 1), target=3, key="anew") == 3
    assert await reader.version() == 3 and await reader.count() == 9


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("call", ["version", "commit"])
async def test_an_error_that_passes_sets_no_manifest_aside(tmp_path: Path, times: int, call: str) -> None:
    """As a network file system gives at opening (a stale handle): the newest version is whole, and was acknowledged."""
    await fill(lance_table(tmp_path), 3)
    table = lance_table(tmp_path)
    real, failed = table._open, failing(OSError(116, "Stale file handle"), times)

    def sometimes(version: int | None = None) -> Any:
        failed()
        return real(version)

    table._open = sometimes  # type: ignore[method-assign]
    asked = table.version() if call == "version" else table.commit(rows(12), target=4, key="next")
    if times == 1:
        assert await asked == (3 if call == "version" else 4)
    else:
        with pytest.raises(TableUnreadable, match=r"version 3, whose manifest .* is whole: .*Stale file handle"):
            await asked
    assert await lance_table(tmp_path).count() == (16 if call == "commit" and times == 1 else 12)


async def test_readers_pass_an_unreadable_newest_manifest_over_and_rename_nothing(tmp_path: Path) -> None:
    await fill(lance_table(tmp_path), 3)
    newest = min((tmp_path / "steps.lance/_versions").glob("*.manifest"))
    newest.write_bytes(b"")
    reader = lance_table(tmp_path)
    assert await reader.version() == 2 and await reader.find("key-1") == 2
    assert (await reader.read())["commit_seq"].to_pylist() == list(range(8))
    assert newest.exists()
    assert await lance_table(tmp_path).commit(rows(50, 1), target=3, key="anew") == 3
    assert await reader.version() == 3 and await reader.count() == 9


async def test_two_unreadable_manifests_are_told_and_nothing_is_renamed(tmp_path: Path) -> None:
    await fill(lance_table(tmp_path), 3)
    manifests = sorted((tmp_path / "steps.lance/_versions").glob("*.manifest"))
    for manifest in manifests[:2]:
        manifest.write_bytes(b"")
    with pytest.raises(TableUnreadable, match="does not open at version 3"):
        await lance_table(tmp_path).version()
    assert sorted((tmp_path / "steps.lance/_versions").glob("*.manifest")) == manifests


async def test_what_is_acknowledged_was_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut takes what was not synced: data must be durable before the manifest that refers to it."""
    names: list[str] = []
    sync = os.fsync

    def recorded(handle: int) -> None:
        names.append(os.readlink(f"/proc/self/fd/{handle}").removeprefix(f"{tmp_path}/"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    await lance_table(tmp_path).commit(rows(0), target=1, key="k")
    kinds = ["data" if n.endswith(".lance") and "/" in n else "manifest" if ".manifest" in n else n for n in names]
    assert kinds.index("data") < kinds.index("steps.lance/data") < kinds.index("manifest")
    assert kinds.index("manifest") < kinds.index("steps.lance/_versions")


@pytest.mark.slow
async def test_small_appends_keep_files_versions_and_commit_times_bounded(tmp_path: Path) -> None:
    """Case 65: a thousand small appends, compacted and cleaned every hundred, leave few files."""
    table = LanceTable(str(tmp_path / "steps.lance"), STEPS, fsync=False)
    version = 0
    for i in range(1000):
        version = await table.commit(rows(i, 1), target=version + 1, key=f"key-{i}")
        if i % 100 == 99:
            version = await table.compact(keep=20)
    assert await table.count() == 1000
    files = [p for p in (tmp_path / "steps.lance").rglob("*") if p.is_file()]
    assert len(files) < 250
    assert len(list((tmp_path / "steps.lance/_versions").glob("*.manifest"))) <= 20


COMPACTOR = """
import asyncio, sys
from laminar.buffer.lance_table import LanceTable
from laminar.buffer.schema import STEPS
async def main():
    print("going", flush=True)
    await LanceTable(sys.argv[1], STEPS, fsync=True).compact(keep=2)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_compaction_that_is_killed_half_way_loses_and_revives_nothing(tmp_path: Path) -> None:
    """Case 65: nothing that was deleted comes back, and the next compaction goes through."""
    table = lance_table(tmp_path)
    await fill(table, 30)
    for pause in (0.35, 0.5, 0.65):
        killed = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", COMPACTOR, table.uri], stdout=subprocess.PIPE
        )
        assert killed.stdout is not None
        await asyncio.to_thread(killed.stdout.readline)
        await asyncio.sleep(pause)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        killed.stdout.close()
        assert sorted((await lance_table(tmp_path).read())["commit_seq"].to_pylist()) == list(range(120))
    await table.compact(keep=2)
    assert sorted((await table.read())["commit_seq"].to_pylist()) == list(range(120))
    version = await table.version()
    assert await table.commit(rows(120), target=version + 1, key="after") == version + 1


async def test_duckdb_and_polars_read_the_table(tmp_path: Path) -> None:
    import duckdb
    import lance

    table = lance_table(tmp_path)
    await fill(table, 2)
    steps = lance.dataset(table.uri)
    groups = duckdb.sql('select "group", sum(tokens) as tokens from steps group by "group"').to_arrow_table()
    assert groups.num_rows == 4
    assert pl.scan_pyarrow_dataset(steps).select("tokens").sum().collect().item() == 56


# -- the twin's hazards -----------------------------------------------------------------------------------------


async def test_the_twin_loses_replies_and_refuses_commits_when_told() -> None:
    table = MemoryTable(STEPS)
    table.lose_reply = True
    with pytest.raises(StoreError, match="reply to commit 'a' was lost"):
        await table.commit(rows(0), target=1, key="a")
    assert await table.find("a") == 1
    table.fail_commit = True
    with pytest.raises(StoreError, match="failed before"):
        await table.commit(rows(4), target=2, key="b")
    assert await table.find("b") is None and await table.version() == 1


@pytest.mark.parametrize("given_up", [False, True])
async def test_the_twin_makes_a_commit_late_if_its_target_is_free_still(given_up: bool) -> None:
    """Whether or not who asked for it waits."""
    table = MemoryTable(STEPS)

    async def late(key: str, target: int, meanwhile: Callable[[], Awaitable[object]]) -> BaseException | int:
        table.late_s = 0.02
        asked = asyncio.create_task(table.commit(rows(0), target=target, key=key))
        await asyncio.sleep(0.01)
        assert await table.find(key) is None
        if given_up:
            asked.cancel()
        await meanwhile()
        await asyncio.sleep(0.05)
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        return outcome

    assert await late("free", 1, table.version) == 1 or given_up
    assert await table.find("free") == 1
    outcome = await late("taken", 2, lambda: table.commit(rows(4), target=2, key="another"))
    assert isinstance(outcome, asyncio.CancelledError if given_up else TargetTaken)
    assert await table.find("taken") is None and await table.version() == 2


async def test_the_twin_forgets_a_late_commit_in_a_power_cut() -> None:
    table = MemoryTable(STEPS)
    table.late_s = 0.01
    asked = asyncio.create_task(table.commit(rows(0), target=1, key="a"))
    await asyncio.sleep(0)
    table.forget_late()
    await asyncio.sleep(0.05)
    asked.cancel()
    assert await table.version() == 0


async def test_the_twin_shows_a_late_append_that_is_rebased() -> None:
    table = MemoryTable(STEPS)
    await fill(table, 2)
    table.unfenced = True
    assert await table.commit(rows(0), target=1, key="late") == 3
    assert await table.count() == 12


async def test_the_twin_has_an_unreadable_newest_version_when_told() -> None:
    table = MemoryTable(STEPS)
    await fill(table, 2)
    table.unreadable = True
    with pytest.raises(TableUnreadable):
        await table.version()
    table.repair()
    assert await table.version() == 1 and await table.count() == 4
