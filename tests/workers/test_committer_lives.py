"""A committer that only crashes is told of, and ends the run; nothing else that ends one does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.records import CommitterTrouble, RelayLoad, RunManifest, TableHead, WorkerRecord
from laminar.buffer.schema import PROMPTS
from laminar.buffer.storage import MemoryStorage, StorageFull
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.errors import (
    ConfigError,
    CoordinationError,
    CoordinationFull,
    CoordinationUnavailable,
    LaminarError,
    LeaseLost,
    StoreError,
)
from laminar.workers import main
from laminar.workers.committer_lives import AWAY, CommitterLives, exit_code, given_up, keep_committer
from laminar.workers.context import Run
from laminar.workers.local import LocalJob
from laminar.workers.patience import StoreAway
from laminar.workers.supervisor.preparation import Plan
from laminar.workers.supervisor.supervision import MAX_BACKOFF_S, MAX_FRUITLESS
from laminar.workers.viewing.status import read_live

KEYS = Keys("run")
EMPTY = PROMPTS.empty_table()
SAID = ["2026-01-01T00:00:00.000 INFO    c is the committer", "Traceback …", "KeyError: 'seq'"]


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


# -- decisions --------------------------------------------------------------------------------------------------


def test_crashes_between_which_nothing_is_committed_are_counted_and_end_the_run() -> None:
    lives = CommitterLives()
    pauses = []
    for crash in range(1, MAX_FRUITLESS + 1):
        assert not given_up({"relay-a": lives.trouble})
        pauses.append(lives.ended(1, 7, SAID))
        assert lives.trouble is not None and lives.trouble.crashes == crash
    assert pauses == sorted(pauses) and pauses[0] < 1 and pauses[-1] == MAX_BACKOFF_S
    why = given_up({"relay-a": lives.trouble})
    assert why.startswith(
        f"the committer beside relay-a crashed {MAX_FRUITLESS} times with no row committed between them, the last time "
        "it ended with exit code 1: KeyError: 'seq'. Its last lines:\n"
    )
    assert why.endswith("\n  KeyError: 'seq'")
    assert lives.ended(1, 7, SAID) == MAX_BACKOFF_S, "its relay goes on with it"


def test_a_committed_row_forgives_all_crashes_before_it() -> None:
    lives = CommitterLives()
    for rows in range(5):
        for _ in range(MAX_FRUITLESS - 1):
            lives.ended(1, rows, SAID)
        assert not given_up({"relay-a": lives.trouble})
    lives.saw(4)
    assert lives.trouble is not None
    lives.saw(5)
    assert lives.trouble is None, "one that lives and commits is no trouble any more"


@pytest.mark.parametrize(
    ("code", "rows"),
    [(0, 3), (AWAY, 3), (-signal.SIGKILL, 3), (-signal.SIGTERM, 3), (1, None), (-signal.SIGSEGV, None)],
)
def test_what_is_no_fault_of_its_own_neither_counts_nor_forgives(code: int, rows: int | None) -> None:
    """It was killed, or etcd or the store was away, as it says itself or its relay sees."""
    lives = CommitterLives()
    for _ in range(MAX_FRUITLESS - 1):
        lives.ended(-signal.SIGSEGV, 3, SAID)
        for _ in range(3):
            assert lives.ended(code, rows, SAID) < 1
    assert lives.trouble is not None and lives.trouble.crashes == MAX_FRUITLESS - 1
    lives.ended(-signal.SIGSEGV, 3, [])
    assert "was killed (signal 11). Its last lines:\n  (it wrote nothing)" in given_up({"relay-a": lives.trouble})


def test_the_run_goes_on_while_the_committer_of_any_host_may_commit() -> None:
    hopeless = CommitterTrouble(crashes=MAX_FRUITLESS, how="ended with exit code 1")
    young = CommitterTrouble(crashes=MAX_FRUITLESS - 1, how="ended with exit code 1")
    assert not given_up({}) and not given_up({"a": hopeless, "b": None}) and not given_up({"a": hopeless, "b": young})
    assert "and so did those of 1 other relays" in given_up({"a": hopeless, "b": hopeless})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CoordinationUnavailable("away"), AWAY),
        (CoordinationFull("full"), AWAY),
        (LeaseLost("lost"), AWAY),
        (StorageFull("full"), AWAY),
        (StoreAway("away"), AWAY),
        (StoreError("refused"), AWAY),
        (CoordinationError("a record is unreadable"), 1),
        (ConfigError("no such option"), 2),
        (LaminarError("else"), 1),
    ],
)
def test_a_committer_says_by_its_exit_code_whether_it_was_its_fault(
    error: LaminarError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(main, "_run_worker", fails)
    with pytest.raises(type(error)):
        main.run_worker("trainer", access=None, run="run")  # type: ignore[arg-type]
    assert error.exit_code == type(error).exit_code
    with pytest.raises(type(error)) as raised:
        main.run_worker("committer", access=None, run="run")  # type: ignore[arg-type]
    assert raised.value.exit_code == exit_code(error) == code


# -- a relay and its committers ---------------------------------------------------------------------------------


class CrashingCommitter:
    """Each one lives for three seconds."""

    pid = 1

    async def start(self) -> None: ...

    async def wait(self) -> int:
        await asyncio.sleep(3)
        return 1

    async def stop(self, *, grace_s: float) -> None: ...

    def said(self) -> list[str]:
        return SAID


class Keeping:
    """A relay that keeps committers which crash at each start."""

    def __init__(self) -> None:
        self.server = MemoryEtcd()
        self.etcd = MemoryCoordination(self.server)
        prints = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")
        file = RunFile(
            run="run", created_at_us=0, config={}, model_folder="", prompts=1, held_out=0, fingerprints=prints
        )
        config = Config.model_validate({"model": {"path": "m"}})
        run = Run(MemoryCoordination(self.server), KEYS, MemoryStorage(), file, config, SystemClock())
        self.run = run
        self.lives = CommitterLives()
        self.task = asyncio.create_task(keep_committer(run, CrashingCommitter, self.lives))

    async def commit(self, rows: int) -> None:
        await self.etcd.put(KEYS.head("experience"), TableHead(lance_version=1, rows=rows).dump())

    def crashes(self) -> int:
        return self.lives.trouble.crashes if self.lives.trouble else 0


@pytest.fixture
async def keeping() -> AsyncIterator[Keeping]:
    made = Keeping()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_a_committer_that_crashes_at_each_start_is_given_up_within_minutes(keeping: Keeping) -> None:
    await asyncio.sleep(120)
    assert keeping.crashes() >= MAX_FRUITLESS and "KeyError: 'seq'" in given_up({"relay-a": keeping.lives.trouble})
    await keeping.commit(5)
    await asyncio.sleep(6)
    assert keeping.crashes() <= 1, "rows that another host's committer committed are forgiveness too"


async def test_rows_that_come_now_and_then_keep_the_run_going(keeping: Keeping) -> None:
    for rows in range(1, 20):
        await keeping.commit(rows)
        await asyncio.sleep(30)
        assert not given_up({"relay-a": keeping.lives.trouble})


async def test_while_etcd_is_away_nothing_is_held_against_it(keeping: Keeping) -> None:
    await asyncio.sleep(2)
    keeping.server.running = False
    await asyncio.sleep(600)
    keeping.server.running = True
    assert keeping.crashes() == 0
    await asyncio.sleep(30)
    assert 0 < keeping.crashes() < MAX_FRUITLESS


async def test_each_living_relay_tells_the_run_of_its_committer() -> None:
    """What a relay that is gone has left does not count; one that has not reported yet is hope."""
    etcd = MemoryCoordination(MemoryEtcd())
    manifest = RunManifest(run="run", store="s", store_id="id", generation=1, format_version=1)
    await etcd.put(KEYS.manifest, manifest.dump())
    trouble = CommitterTrouble(crashes=MAX_FRUITLESS, how="ended with exit code 1", said=["KeyError"])
    record = WorkerRecord(kind="relay", id="r1", host="h", pid=1, started_at_us=0)
    await etcd.put(KEYS.worker("relay", "r1"), record.dump())
    for relay in ("r1", "gone"):
        await etcd.put(KEYS.load("relay", relay), RelayLoad(epoch=0, held={}, committer=trouble).dump())
    live = await read_live(etcd, "run")
    assert live.committers == {"r1": trouble} and given_up(live.committers)
    await etcd.put(KEYS.worker("relay", "r2"), record.model_copy(update={"id": "r2"}).dump())
    live = await read_live(etcd, "run")
    assert live.committers == {"r1": trouble, "r2": None} and not given_up(live.committers)
    await etcd.close()


async def test_the_run_ends_with_the_last_lines_of_a_committer_that_only_crashes(tmp_path: Path) -> None:
    etcd = MemoryCoordination(MemoryEtcd())
    prints = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")
    file = RunFile(run="run", created_at_us=0, config={}, model_folder="", prompts=1, held_out=0, fingerprints=prints)
    config = Config.model_validate({"model": {"path": "m"}})
    manifest = RunManifest(run="run", store="s", store_id=file.store_id, generation=1, format_version=1)
    await etcd.put(KEYS.manifest, manifest.dump())
    record = WorkerRecord(kind="relay", id="relay-a", host="h", pid=1, started_at_us=0)
    await etcd.put(KEYS.worker("relay", "relay-a"), record.dump())
    plan = Plan(config, MemoryStorage(), Path("m"), EMPTY, EMPTY, "", prints, file)
    job = LocalJob(config, plan, file, etcd, KEYS, EtcdAccess(("h:1",)), tmp_path, None)
    watching = asyncio.create_task(job._watch(asyncio.Event(), [], []))
    lives = CommitterLives()
    for _ in range(MAX_FRUITLESS):
        await asyncio.sleep(5)
        assert not watching.done()
        lives.ended(1, 0, SAID)
        await etcd.put(KEYS.load("relay", "relay-a"), RelayLoad(epoch=0, held={}, committer=lives.trouble).dump())
    state, reason = await watching
    assert state == "failed" and reason == given_up({"relay-a": lives.trouble}) and reason.endswith(SAID[-1])
    await etcd.close()
