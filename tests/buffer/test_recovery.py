"""A lost etcd is rebuilt from the store: each drawn trajectory is in exactly one place again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.buffer import claims
from laminar.buffer.audit import check, gather
from laminar.buffer.claims import TrajectoryId, reassigned, restarted
from laminar.buffer.commits import TableCommitter
from laminar.buffer.coordination import absent
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.extent import behind, read_extent
from laminar.buffer.keys import Keys, generation_of
from laminar.buffer.manifest import Fingerprints, RunFile, read_run, write_run
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.partials import Partial, PartialLog, PartialRow, Span
from laminar.buffer.rebuilding import BATCH, Rebuilder
from laminar.buffer.records import (
    BatchDecision,
    Claim,
    Incoming,
    RunManifest,
    Source,
    TableHead,
    TrainerHead,
    WeightsHead,
)
from laminar.buffer.recovery import Known, Recovery, plan, records
from laminar.buffer.remains import IncomingFile, Remains, Unfinished, read_remains
from laminar.buffer.schema import EXPERIENCE, STEP_METRICS, STEPS, TABLES
from laminar.buffer.segments import encode
from laminar.buffer.steps import StepLog, batch_rows
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable
from laminar.errors import ConfigError, CoordinationUnavailable, Fenced, StoreError

Start = Callable[..., Awaitable[Any]]
NAME = "run"
OLD = Keys(NAME)
SAMPLES = 2
DIGESTS = {v: f"{v:016x}" + "f" * 48 for v in range(4)}


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


def row(
    id: TrajectoryId, term: int, worker: str, offset: int, tokens: int, version: int, role: str = "policy"
) -> PartialRow:
    policy = role == "policy"
    return PartialRow(
        *id, term, 0, offset, role, [7] * tokens, [-0.5] * tokens if policy else [], version, DIGESTS[version], worker,
        None, "generating", None, 0, 0,
    )  # fmt: skip


def rows_of(id: TrajectoryId, term: int, worker: str, tokens: int, version: int) -> list[PartialRow]:
    """A prompt of two tokens, then `tokens` of the policy."""
    written = [row(id, term, worker, 0, tokens, version)] if tokens else []
    return [row(id, term, worker, 0, 2, version, "prompt"), *written]


def finished(id: TrajectoryId, version: int = 0, at: int = 0, text: str = "") -> Finished:
    partial = Partial([1], [5, 6], [True, True], [-0.5, -0.25], [Span(0, version, "w", DIGESTS[version])], 0, "scoring",
                      None, "stop", 0)  # fmt: skip
    return Finished(
        group=id[0], sample=id[1], prompt_index=0, epoch=0, partial=partial, finish_reason="stop", status="ok",
        error="", reward=float(id[1]), reward_parts={}, text=text, attempts=0, finished_at=at,
    )  # fmt: skip


def sample_row(step: int, group: int, sample: int) -> dict[str, Any]:
    return {
        "step": step, "group": group, "sample": sample, "advantage": 0.5, "staleness": 0, "tokens": 2,
        "mean_ratio": 1.0, "clip_fraction": None, "policy_loss": 0.1, "mean_logprob": -0.5, "commit_seq": -1,
    }  # fmt: skip


class World:
    """A run of seven groups of two on the twin, in the midst of its work:

    groups 0, 1   committed; step 0 trained 0 and retired 1, which made version 1; its record is not committed yet
    group 2       committed
    group 3       one sample registered, one being scored by its second owner
    groups 4, 5   generating: one sample with 5 tokens, one handed over in between, two of which nothing is durable
    group 6       drawn under version 1, nothing of it anywhere
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.tables = {name: MemoryTable(schema) for name, schema in TABLES.items()}
        self.names = 0

    async def make(self) -> World:
        prints = Fingerprints(model="a", tokenizer="b", template="c", prompts="d", held_out="e")
        file = RunFile(
            run=NAME, created_at_us=0, config={}, model_folder="m", prompts=99, held_out=0, fingerprints=prints
        )
        await write_run(self.storage, file)
        self.manifest = RunManifest(
            run=NAME, store=self.storage.url, store_id=file.store_id, generation=1, format_version=1
        )
        await MemoryCoordination(self.server).put(OLD.manifest, self.manifest.dump())
        self.w = await self.start(self.server, OLD, "w")
        held = {h.id: h for h in await self.draw(7)}
        await self.lead(OLD)
        await self.publish(0)
        await self.steps.record_initial("t", DIGESTS[0], 0)
        await self.finish("w-0", [held[i] for i in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))])
        await self.commit()
        rows = await batch_rows(self.tables["experience"], {0: "train", 1: "no_signal"})
        await self.steps.decide(0, rows, [0], {1: "no_signal"})
        await self.publish(1)
        await self.steps.record(0, "t", [sample_row(0, 0, s) for s in range(2)], {}, 1, DIGESTS[1], 0)
        await self.finish("w-1", [held[3, 0]])
        await self.write("w", [*rows_of((3, 1), 1, "w", 3, 0), *rows_of((4, 0), 1, "w", 5, 0)])
        await self.write("w", rows_of((5, 0), 1, "w", 4, 0))
        await self.write("v", [*rows_of((3, 1), 2, "v", 6, 0), *rows_of((5, 0), 2, "v", 0, 0)])
        return self

    async def draw(self, groups: int, version: int = 0) -> list[claims.Held]:
        return list(await self.w.ledger.draw(groups=lambda cursor: groups, samples_per_prompt=SAMPLES, version=version))

    async def lead(self, keys: Keys) -> None:
        self.names += 1
        self.t = await self.start(self.server, keys, f"t{self.names}", "trainer")
        self.c = await self.start(self.server, keys, f"c{self.names}", "committer")
        self.steps = StepLog(self.t.coordination, keys, self.t.ledger, self.storage)
        self.committers = {
            name: TableCommitter(
                name, schema, self.tables[name], self.c.coordination, keys, self.c.ledger, self.storage
            )
            for name, schema in TABLES.items()
        }  # fmt: skip
        self.keys = keys

    async def publish(self, version: int) -> None:
        head = WeightsHead(version=version, digest=DIGESTS[version], layout_digest="l", bytes=1, master="")
        before = await self.t.coordination.get(self.keys.weights)
        guard = claims.unchanged(before) if before else absent(self.keys.weights)
        assert await self.t.ledger.guarded_put(self.keys.weights, head, guard)

    async def finish(self, segment: str, held: list[claims.Held], version: int = 0) -> None:
        incoming = await write_incoming(self.storage, "w", segment, [finished(h.id, version) for h in held])
        assert await self.w.ledger.finish(held, segment, incoming) == []

    async def write(self, worker: str, rows: list[PartialRow]) -> None:
        log = PartialLog(self.storage, worker, sync=True)
        log._next = len(await self.storage.list(f"partials/{worker}"))
        await log.append(rows)

    async def commit(self) -> None:
        for committer in self.committers.values():
            while await committer.registered():
                await committer.run_once()

    def lose_etcd(self) -> None:
        self.server = MemoryEtcd()

    async def copy(self, *, etcd: bool) -> World:
        """What processes that all died left, with what etcd held of it or without."""
        world = World(self.start)
        world.manifest = self.manifest
        world.storage._files = {p: replace(f, data=bytearray(f.data)) for p, f in self.storage._files.items()}
        for name, table in world.tables.items():
            table._versions = list(self.tables[name]._versions)
        for kv in (await MemoryCoordination(self.server).range(OLD.root)).items:
            if etcd and not kv.lease:
                await MemoryCoordination(world.server).put(kv.key, kv.value)
        return world

    async def remains(self, checkpoints: tuple[tuple[int, str], ...] = ()) -> Remains:
        return await read_remains(self.storage, self.tables, checkpoints)

    async def recover(
        self, coordination: Any = None, storage: Any = None, tables: Any = None, checkpoints: tuple[Any, ...] = ()
    ) -> tuple[Recovery, Keys]:
        coordination = coordination or MemoryCoordination(self.server)
        storage, tables = storage or self.storage, tables or self.tables
        file = await read_run(storage)
        rebuilder = await Rebuilder.begin(coordination, storage, tables, file, self.manifest)

        async def make_plan(known: Known, generation: int) -> Recovery:
            remains = await read_remains(storage, tables, checkpoints)
            made = plan(
                remains, known, samples_per_prompt=SAMPLES, generation=generation, evaluate_every=0, max_steps=9
            )
            made.validate(remains, SAMPLES)
            return made

        made = await rebuilder.rebuild(make_plan)
        await rebuilder.close()
        return made

    async def problems(self, keys: Keys) -> list[str]:
        picture = await gather(
            MemoryCoordination(self.server), keys, self.storage, self.tables, samples_per_prompt=SAMPLES,
            on_version_lost="restart",
        )  # fmt: skip
        return check(picture).problems

    async def claim(self, keys: Keys, id: TrajectoryId) -> Claim:
        kv = await MemoryCoordination(self.server).get(keys.claim(*id))
        assert kv is not None
        return Claim.parse(kv.value)


@pytest.fixture
async def world(start: Start) -> World:
    return await World(start).make()


# -- what is rebuilt --------------------------------------------------------------------------------------------


async def test_a_lost_etcd_is_rebuilt_and_the_audit_is_content(world: World) -> None:
    assert await world.problems(OLD) == []
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert await world.problems(keys) == []
    assert keys.generation == 2 and (await read_run(world.storage)).generation == 2
    assert recovery.damage == []


async def test_drawn_groups_of_which_nothing_is_durable_below_the_highest_begin_anew_and_above_are_drawn_again(
    world: World,
) -> None:
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert recovery.cursor == 6, "group 6 left no trace: the next draw is of it, with the same prompt"
    anew = await world.claim(keys, (4, 1))
    assert (anew.owner, anew.state, anew.source.worker, anew.progress) == ("", "waiting", claims.NOBODY, 0)
    assert anew.version == 1, "under the newest version"


async def test_an_unfinished_trajectory_goes_on_from_the_log_that_has_most_of_it(world: World) -> None:
    world.lose_etcd()
    recovery, keys = await world.recover()
    scored = await world.claim(keys, (3, 1))
    assert (scored.source, scored.progress, scored.version) == (Source(worker="v", term=2), 6, 0)
    assert scored.term == 3, "above any that was written"
    moved = await world.claim(keys, (5, 0))
    assert (moved.source, moved.progress, moved.term) == (Source(worker="w", term=1), 4, 3)
    assert recovery.kept_tokens == {(3, 1): 6, (4, 0): 5, (4, 1): 0, (5, 0): 4, (5, 1): 0}


async def test_durable_segments_are_registered_again_and_committed_ones_are_not(world: World) -> None:
    """A committer that died between its commit and its unregistering leaves the file of committed rows behind."""
    data = encode(EXPERIENCE, [pa.RecordBatch.from_pylist([finished((0, 0)).row()], EXPERIENCE)])
    await world.storage.write("incoming/experience/w-0.arrow", data)
    world.lose_etcd()
    recovery, _ = await world.recover()
    assert [(s.table, s.id, s.rows) for s in recovery.segments] == [
        ("experience", "w-1", 1), ("step_metrics", "t-step-000000000", 1), ("steps", "t-step-000000000", 2),
    ]  # fmt: skip
    assert recovery.left_out == {"committed already": 1}


async def test_the_trainer_goes_on_where_it_was(world: World) -> None:
    old = TrainerHead.parse((await world.w.coordination.get(OLD.trainer)).value)
    world.lose_etcd()
    recovery, _ = await world.recover(checkpoints=((1, ""), (0, DIGESTS[0])))
    by = {"by": old.by, "checkpoint": -1}
    assert recovery.trainer.model_copy(update=by) == old and recovery.trainer.checkpoint == 1
    assert [d.trained for d in recovery.decisions] == [[0]]
    assert recovery.weights == WeightsHead(version=1, digest=DIGESTS[1], layout_digest="", bytes=0, master="")


async def test_the_run_goes_on_to_its_end(world: World) -> None:
    """Case 31: what was in flight when etcd was lost is finished and trained once."""
    world.lose_etcd()
    _, keys = await world.recover()
    world.w = await world.start(world.server, keys, "x")
    await world.lead(keys)
    manager = await world.start(world.server, keys, "m", "manager")
    for kv in (await world.w.coordination.range(keys.claims)).items:
        orphan = claims.Held.of(kv)
        assert await manager.ledger.hand_over(orphan, reassigned(orphan.claim, "x", "death"))
        mine = claims.Held.of(await world.w.coordination.get(kv.key))
        taken = await world.w.ledger.adopt(mine, version=mine.claim.version, progress=0)
        await world.finish(f"x-{orphan.id[0]}-{orphan.id[1]}", [taken], taken.claim.version)
    assert [h.id[0] for h in await world.draw(1, version=1)] == [6, 6]
    await world.commit()
    uses = {2: "train", 3: "train", 4: "no_signal", 5: "train"}
    rows = await batch_rows(world.tables["experience"], uses)
    await world.steps.decide(1, rows, [2, 3, 5], {4: "no_signal"})
    trained = [sample_row(1, group, sample) for group in (2, 3, 5) for sample in range(SAMPLES)]
    await world.steps.record(1, "t2", trained, {}, 2, DIGESTS[2], 0)
    await world.publish(2)
    await world.commit()
    assert await world.problems(keys) == []
    assert await world.tables["experience"].count() == 12
    assert sorted((await world.tables["experience"].read())["commit_seq"].to_pylist()) == list(range(12))


async def test_a_store_in_which_nothing_was_generated_is_rebuilt_too(start: Start) -> None:
    world = World(start)
    await World.make(world)
    world.storage._files = {k: f for k, f in world.storage._files.items() if k == "run.json"}
    world.tables = {name: MemoryTable(schema) for name, schema in TABLES.items()}
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert (recovery.cursor, recovery.claims, recovery.weights, recovery.trainer.decided) == (0, {}, None, 0)
    assert await world.problems(keys) == []


# -- one place each ---------------------------------------------------------------------------------------------


async def test_a_trajectory_that_two_owners_finished_is_registered_once(world: World) -> None:
    """An owner whose claim was lost left an unregistered segment; the later owner finished the same trajectory. Only
    some rows of the first count, so they are written as a segment of their own. Case 28."""
    await write_incoming(world.storage, "u", "u-0", [finished((3, 0), at=1, text="late"), finished((4, 1), at=1)])
    await write_incoming(world.storage, "v", "v-0", [finished((3, 0), at=9, text="later"), finished((3, 1), at=9)])
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert [(s.id, s.trajectories) for s in recovery.segments if s.table == "experience"] == [
        ("recovery-002-u-0", ["000000000004-001"]), ("v-0", ["000000000003-000", "000000000003-001"]),
    ]  # fmt: skip
    assert await world.problems(keys) == []
    await world.lead(keys)
    await world.commit()
    rows = (await world.tables["experience"].read(filter="group = 3")).to_pylist()
    assert [r["text"] for r in rows if r["sample"] == 0] == ["later"]


async def test_a_damaged_segment_counts_as_not_there(world: World) -> None:
    world.storage.damage("incoming/experience/w-1.arrow", 2500, b"\xaa\x55\xaa")
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert (3, 0) in recovery.claims and "w-1.arrow" in recovery.damage[0]
    assert await world.problems(keys) == []


HOW = pytest.mark.parametrize("how", ["flipped", "missing", "truncated"])
OF_STEPS = pytest.mark.parametrize("table", ["steps", "step_metrics"])


async def test_a_segment_that_the_store_refuses_for_a_moment_is_not_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be sound: recovery says so and changes nothing, and the next one registers it."""
    world.lose_etcd()
    read, refusing = world.storage.read, True

    async def refused(path: str) -> bytes:
        if refusing and path == "incoming/experience/w-1.arrow":
            raise StoreError(f"cannot read {path}: 503 Slow Down")
        return await read(path)

    monkeypatch.setattr(world.storage, "read", refused)
    with pytest.raises(StoreError, match=r"w-1\.arrow cannot be read for now: .*503 Slow Down.*nothing was changed"):
        await world.remains()
    refusing = False
    recovery, _ = await world.recover()
    assert recovery.damage == [] and (3, 0) not in recovery.claims


@HOW
@pytest.mark.parametrize("folder", ["incoming", "incoming/copies"])
@OF_STEPS
async def test_what_a_step_left_is_recovered_once_from_the_file_that_is_sound(
    world: World, table: str, folder: str, how: str
) -> None:
    await world.storage.spoil(how, f"{folder}/{table}/t-step-000000000.arrow")
    for _ in range(2):  # what a recovery left is what the next one begins with
        world.lose_etcd()
        recovery, keys = await world.recover()
        assert sorted((s.table, s.id, s.rows) for s in recovery.segments if s.table != "experience") == [
            ("step_metrics", "t-step-000000000", 1), ("steps", "t-step-000000000", 2),
        ]  # fmt: skip
        assert recovery.trainer.step == 1 and recovery.left_out == {}
        assert [("its copy is used" in text) for text in recovery.damage] == [True] * (folder == "incoming")
        assert await world.problems(keys) == []
    await world.lead(keys)
    await world.commit()
    assert await world.problems(keys) == []
    assert (await world.tables["steps"].count(), await world.tables["step_metrics"].count()) == (2, 2)


@HOW
@OF_STEPS
async def test_a_step_is_recorded_again_if_both_files_of_what_it_left_are_damaged(
    world: World, table: str, how: str
) -> None:
    paths = [f"{folder}/{table}/t-step-000000000.arrow" for folder in ("incoming", "incoming/copies")]
    await world.storage.spoil(how, *paths)
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert recovery.trainer.step == 0 and not [s for s in recovery.segments if s.table != "experience"]
    assert len(recovery.damage) == (0 if how == "missing" else 2)
    await world.lead(keys)
    await world.steps.record(0, "t9", [sample_row(0, 0, s) for s in range(2)], {}, 1, DIGESTS[1], 0)
    await world.commit()
    assert await world.problems(keys) == []


async def test_a_segment_of_which_only_some_rows_count_is_written_twice_if_they_are_made_once(world: World) -> None:
    """One of the step's rows is committed: the others are a segment of their own."""
    await world.tables["steps"].commit(
        pa.Table.from_pylist([{**sample_row(0, 0, 0), "commit_seq": 0}], STEPS), target=1, key="k"
    )
    world.lose_etcd()
    recovery, keys = await world.recover()
    [path] = [s.path for s in recovery.segments if s.table == "steps"]
    assert path == "incoming/steps/recovery-002-t-step-000000000.arrow"
    await world.storage.delete(path)
    await world.lead(keys)
    await world.commit()
    assert await world.problems(keys) == [] and await world.tables["steps"].count() == 2


async def test_a_damaged_log_gives_what_stands_before_the_damage(world: World) -> None:
    world.storage.damage("partials/w/000001.arrows", 2600, b"\xaa\x55\xaa")
    world.lose_etcd()
    recovery, _ = await world.recover()
    assert recovery.kept_tokens[5, 0] == 0 and recovery.claims[5, 0].source == Source(worker="v", term=2)


async def test_a_step_of_which_only_the_metrics_are_durable_is_recorded_again(world: World) -> None:
    """The trainer died while it wrote the files of the record: neither was registered."""
    await world.commit()
    metrics = {"step": 1, "version": 2, "digest": DIGESTS[2], "metrics": "{}", "at": 0, "commit_seq": -1}
    await world.steps.decide(1, await batch_rows(world.tables["experience"], {2: "train"}), [2], {})
    data = encode(STEP_METRICS, [pa.RecordBatch.from_pylist([metrics], STEP_METRICS)])
    await world.storage.write("incoming/step_metrics/t-step-000000001.arrow", data)
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert (recovery.trainer.step, recovery.trainer.decided) == (1, 2)
    assert recovery.left_out == {"of a step that is not recorded": 1}
    await world.lead(keys)
    await world.steps.record(1, "t9", [sample_row(1, 2, s) for s in range(SAMPLES)], {}, 2, DIGESTS[2], 0)
    await world.publish(2)
    await world.commit()
    assert await world.problems(keys) == []


async def test_a_step_that_two_trainers_recorded_is_registered_from_one_of_them(world: World) -> None:
    samples = encode(STEPS, [pa.RecordBatch.from_pylist([sample_row(0, 0, s) for s in range(2)], STEPS)])
    await world.storage.write("incoming/steps/a-step-000000000.arrow", samples)
    world.lose_etcd()
    recovery, keys = await world.recover()
    chosen = {s.table: s.id for s in recovery.segments if s.table != "experience"}
    assert chosen == {"step_metrics": "t-step-000000000", "steps": "t-step-000000000"}
    await world.lead(keys)
    await world.commit()
    assert await world.problems(keys) == []


async def test_an_ending_that_did_not_come_about_retires_nothing(world: World) -> None:
    stale = BatchDecision(step=0, file="f", sha256="s", trained=[], retired={1: "remainder"}, decided_by="t")
    await world.storage.write("batches/closing-000000000-000.json", stale.dump().encode())
    world.lose_etcd()
    recovery, _ = await world.recover()
    assert recovery.closings == {} and recovery.trainer.consumed_groups == 2
    assert "closing-000000000-000.json retires groups that a step has consumed" in recovery.damage[0]


async def test_what_an_ending_retired_stays_consumed_and_the_run_ends_again(world: World) -> None:
    rows = await batch_rows(world.tables["experience"], {2: "remainder"})
    await world.steps.close(rows, {2: "remainder"}, "enough")
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert (recovery.trainer.state, recovery.trainer.consumed_groups) == ("running", 3)
    assert await world.problems(keys) == []


async def test_a_missing_decision_is_named_and_nothing_is_rebuilt(world: World) -> None:
    await world.steps.decide(1, await batch_rows(world.tables["experience"], {2: "train"}), [2], {})
    await world.storage.delete("batches/000000000.json")
    world.lose_etcd()
    with pytest.raises(StoreError, match=r"none of step 0 \(1 are missing\): restore batches/000000000.json"):
        await world.recover()
    assert await MemoryCoordination(world.server).get(OLD.manifest) is None


async def test_recorded_steps_without_their_decisions_are_refused(world: World) -> None:
    await world.storage.delete("batches/000000000.json")
    with pytest.raises(StoreError, match="step 0 is recorded, and only 0 steps have a decision"):
        plan(await world.remains(), Known(), samples_per_prompt=2, generation=2, evaluate_every=0, max_steps=9)


# -- versions ---------------------------------------------------------------------------------------------------


async def test_a_version_that_only_a_trajectory_names_was_published(world: World) -> None:
    """Etcd was lost between the publication of a version and the record of its step; a rollout had loaded it."""
    await world.write("w", rows_of((4, 1), 1, "w", 2, 2))
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert recovery.weights is not None and (recovery.weights.version, recovery.weights.digest) == (2, DIGESTS[2])
    assert await world.problems(keys) == []


async def test_other_digests_under_which_a_version_was_had_are_kept(world: World) -> None:
    """`replay_drift`: trajectories name bits that a resumed trainer offered in the place of the published ones."""
    other = "d" * 64
    drifted = finished((3, 1)).row() | {"span_digest": [other]}
    data = encode(EXPERIENCE, [pa.RecordBatch.from_pylist([drifted], EXPERIENCE)])
    await world.storage.write("incoming/experience/v-0.arrow", data)
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert [(w.version, w.digest) for w in recovery.offers] == [(0, other)]
    await world.lead(keys)
    await world.commit()
    assert await world.problems(keys) == []


async def test_evaluations_that_were_due_and_can_still_be_done_are_asked_for_again(world: World) -> None:
    remains = await world.remains(((1, DIGESTS[1]),))

    def asked(every: int, done: set[Any] = frozenset()) -> list[int]:  # type: ignore[assignment]
        remains.committed["evaluation"] = {(v, "greedy", 0, 0) for v in done}
        made = plan(remains, Known(), samples_per_prompt=2, generation=2, evaluate_every=every, max_steps=9)
        return [r.version for r in made.evaluations]

    assert asked(1) == [1], "the weights of version 0 are nowhere any more"
    assert asked(1, {1}) == asked(2) == asked(0) == []


# -- an etcd that is there --------------------------------------------------------------------------------------


async def test_an_etcd_from_an_old_copy_is_seen_to_be_behind_its_store(world: World) -> None:
    """Restored while everything was committed that the copy does not know: consistent in itself, hence a trap."""
    coordination = MemoryCoordination(world.server)
    copy = (await coordination.range(OLD.root)).items
    await world.commit()
    await world.steps.decide(1, await batch_rows(world.tables["experience"], {2: "train"}), [2], {})
    world.lose_etcd()
    restored = MemoryCoordination(world.server)
    for kv in copy:
        await restored.put(kv.key, kv.value)
    problems = await world.problems(OLD)
    assert any("the table experience holds 7 committed rows, etcd knows of 6" in p for p in problems), problems
    assert any("the store has 2 decided steps, etcd knows of 1" in p for p in problems)
    assert all("rebuild etcd with `laminar recover`" in p for p in problems if "etcd knows of" in p)
    _, keys = await world.recover()
    assert await world.problems(keys) == []
    left = (await MemoryCoordination(world.server).range(OLD.root)).items
    assert {generation_of(kv.key) for kv in left} == {None, keys.generation}


async def test_a_working_run_is_never_ahead_of_its_etcd(world: World) -> None:
    table = world.tables["experience"]
    table.lose_reply = True
    with pytest.raises(StoreError, match="was lost"):
        await world.committers["experience"].run_once()
    extent = await read_extent(world.storage, world.tables)
    assert extent.rows["experience"] == 7
    items = (await MemoryCoordination(world.server).range(OLD.prefix)).items
    assert behind(extent, items, OLD) == [], "announced, though not yet unregistered"


async def test_what_etcd_still_knows_of_a_claim_is_kept(world: World) -> None:
    """Attempts, deaths and terms that no log tells of, and groups of which nothing is durable."""
    held = claims.Held.of(await world.w.coordination.get(OLD.claim(4, 1)))
    claim = restarted(held.claim, version=1, error="broken tool", counts=True)
    assert await world.w.ledger.update(held, claim.model_copy(update={"deaths": 3}))
    recovery, keys = await world.recover()
    kept = await world.claim(keys, (4, 1))
    assert (kept.attempts, kept.deaths, kept.last_error, kept.term) == (1, 3, "broken tool", 3)
    assert recovery.cursor == 7 and recovery.weights is not None and recovery.weights.layout_digest == "l"
    assert await world.problems(keys) == []


async def test_workers_of_the_old_generation_are_fenced_out(world: World) -> None:
    """One that is only slow finds its lease gone; a late commit of what it had announced finds its target taken."""
    held = claims.Held.of(await world.w.coordination.get(OLD.claim(4, 0)))
    table, real = world.tables["experience"], world.tables["experience"].commit
    late: list[Any] = []

    async def paused(rows: pa.Table, *, target: int, key: str) -> int:
        late.append((rows, target, key))
        raise StoreError("paused just before its commit")

    table.commit = paused  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="paused"):
        await world.committers["experience"].run_once()
    table.commit = real  # type: ignore[method-assign]
    _, keys = await world.recover()
    (rows, target, key), before = late[0], await table.count()
    with pytest.raises(StoreError, match=f"was to become version {target}"):
        await table.commit(rows, target=target, key=key)
    assert await table.count() == before
    with pytest.raises(Fenced):
        await world.w.ledger.update(held, held.claim)
    with pytest.raises(Fenced):
        await world.steps.change_head(to_retire=1)
    assert await world.problems(keys) == []


async def test_nobody_joins_while_a_recovery_is_at_work(world: World) -> None:
    rebuilder = await Rebuilder.begin(
        MemoryCoordination(world.server), world.storage, world.tables, await read_run(world.storage), world.manifest
    )
    with pytest.raises(CoordinationUnavailable, match="is being recovered"):
        await world.start(world.server, OLD, "y")
    with pytest.raises(ConfigError, match="another recovery of run 'run' is at work"):
        await world.recover()
    await rebuilder.close()
    await world.start(world.server, OLD, "z")


# -- dying on the way -------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Countdown:
    def __init__(self, operations: int) -> None:
        self.left = operations
        self.done = 0

    def tick(self) -> None:
        if self.done >= self.left:
            raise Killed
        self.done += 1


class Mortal:
    """Whatever is behind it, until the countdown ends: from then on its user is dead."""

    def __init__(self, inner: Any, countdown: Countdown) -> None:
        self.inner = inner
        self.countdown = countdown

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not asyncio.iscoroutinefunction(value):
            return value

        async def call(*arguments: Any, **named: Any) -> Any:
            self.countdown.tick()
            return await value(*arguments, **named)

        return call


async def crash_after(world: World, operations: int) -> bool:
    """One attempt that dies before its next operation; whether it died."""
    countdown = Countdown(operations)
    client = MemoryCoordination(world.server)
    mortal = Mortal(client, countdown)
    tables = {name: Mortal(table, countdown) for name, table in world.tables.items()}
    try:
        await world.recover(mortal, Mortal(world.storage, countdown), tables)
        return False
    except Killed:
        for kv in (await MemoryCoordination(world.server).range(OLD.recovering)).items:
            world.server.revoke(kv.lease)
        return True


async def outcome(world: World) -> dict[str, Any]:
    """What the newest generation says, but for what counts attempts: terms, versions of tables, names of segments."""
    client = MemoryCoordination(world.server)
    kv = await client.get(OLD.manifest)
    assert kv is not None
    keys = Keys(NAME, RunManifest.parse(kv.value).generation)
    assert await world.problems(keys) == []
    found = {kv.key[len(keys.prefix) :]: kv.value for kv in (await client.range(keys.prefix)).items}
    registered = [Incoming.parse(v) for k, v in found.items() if k.startswith("incoming/")]
    rest: dict[str, Any] = {k: v for k, v in found.items() if not k.startswith(("incoming/", "tables/"))}
    for key in [k for k in rest if k.startswith("claims/")]:
        rest[key] = Claim.parse(rest[key]).model_copy(update={"term": 0})
    return rest | {"registered": sorted((i.table, i.rows, *i.trajectories) for i in registered)}


@pytest.mark.parametrize("etcd", [False, True], ids=["lost", "there"])
async def test_a_recovery_may_die_at_any_instant(world: World, etcd: bool) -> None:
    await write_incoming(world.storage, "u", "u-0", [finished((3, 0), at=1), finished((4, 1), at=1)])
    undisturbed = await world.copy(etcd=etcd)
    await undisturbed.recover()
    expected = await outcome(undisturbed)
    for operations in itertools.count():
        attempt = await world.copy(etcd=etcd)
        if not await crash_after(attempt, operations):
            break
        if etcd:
            await outcome(attempt)  # sound at this instant too, in whichever generation
        await attempt.recover()
        assert await outcome(attempt) == expected, f"after a death at operation {operations}"
    assert operations > 30


async def test_many_claims_take_many_transactions(world: World) -> None:
    held = await world.draw(40) + await world.draw(40)
    await world.write("w", [r for h in held for r in rows_of(h.id, 1, "w", 1, 0)])
    world.lose_etcd()
    recovery, keys = await world.recover()
    assert len(recovery.claims) > BATCH
    assert len((await MemoryCoordination(world.server).range(keys.claims)).items) == len(recovery.claims)


# -- any state --------------------------------------------------------------------------------------------------


@st.composite
def remains(draw: st.DrawFn) -> Remains:
    """Each trajectory of some groups anywhere: committed, in up to two of four segments, in logs, or nowhere."""
    groups = draw(st.integers(0, 4))
    ids = [(g, s) for g in range(groups) for s in range(SAMPLES)]
    result = Remains()
    files: dict[str, list[TrajectoryId]] = {}
    for id in ids:
        if draw(st.booleans()):
            result.committed["experience"].add(id)
        for name in draw(st.sets(st.sampled_from("abcd"), max_size=2)):
            files.setdefault(name, []).append(id)
        if term := draw(st.integers(0, 3)):
            result.terms[id] = term
            if draw(st.booleans()):
                source = Source(worker=draw(st.sampled_from("vw")), term=draw(st.integers(1, term)))
                tokens = draw(st.integers(0, 9))
                result.unfinished[id] = Unfinished(source, draw(st.integers(0, 3)), tokens, tokens)
    for name, held in files.items():
        rows = [finished(id, at=draw(st.integers(0, 2))).row() for id in held]
        table = pa.Table.from_pylist(rows, schema=EXPERIENCE)
        result.incoming.append(IncomingFile("experience", f"incoming/experience/{name}.arrow", table))
    consumed = draw(st.lists(st.sampled_from(range(groups)), unique=True)) if groups else []
    for step, group in enumerate(consumed):
        result.decisions.append(
            BatchDecision(step=step, file="f", sha256="s", trained=[group], retired={}, decided_by="t")
        )
    result.heads = {name: TableHead(lance_version=1, rows=0) for name in TABLES}
    return result


@settings(max_examples=60, deadline=None)
@given(left=remains(), cursor=st.integers(0, 6), attempts=st.integers(0, 2))
def test_from_any_store_each_drawn_trajectory_is_in_one_place(left: Remains, cursor: int, attempts: int) -> None:
    old = {(0, 0): claims.drawn("w", 0).model_copy(update={"attempts": attempts, "term": 4})}
    known = Known(cursor=cursor, claims=old if cursor else {})
    made = plan(left, known, samples_per_prompt=SAMPLES, generation=2, evaluate_every=0, max_steps=9)
    made.validate(left, SAMPLES)
    assert made.cursor >= cursor
    for id, claim in made.claims.items():
        claims.validate(known.claims.get(id), claim)
        assert claim.term > left.terms.get(id, 0) and claim.source.term <= claim.term
        assert made.kept_tokens[id] == (left.unfinished[id].tokens if id in left.unfinished else 0)
    for segment in made.segments:
        rows = segment.rewritten.num_rows if segment.rewritten is not None else segment.rows
        assert rows == segment.rows == len(segment.trajectories) > 0
        assert (segment.rewritten is None) == (segment.path in {f.path for f in left.incoming})
    assert made.trainer.consumed_groups == len(left.decisions) == made.trainer.decided
    assert len({op.key for op in records(made, Keys(NAME, 2))}) == len(records(made, Keys(NAME, 2)))
