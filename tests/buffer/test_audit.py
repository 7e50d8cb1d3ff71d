"""The audit reports each broken invariant by its own message, and nothing of a sound run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer import archive, claims
from laminar.buffer.archive import ArchivedStep, write_block
from laminar.buffer.audit import Picture, check, gather
from laminar.buffer.claims import Held
from laminar.buffer.commits import TableCommitter
from laminar.buffer.coordination import KeyValue
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryEtcd
from laminar.buffer.partials import Partial, Span
from laminar.buffer.records import BatchDecision, TrainerHead, WeightsHead
from laminar.buffer.schema import TABLES
from laminar.buffer.steps import BATCH, StepLog
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable

KEYS = Keys("run")
DIGESTS = {v: f"{v:016x}" + "f" * 48 for v in range(3)}


def finished(group: int, sample: int, version: int = 0, status: str = "ok") -> Finished:
    """Two tokens, one of the environment, one more token."""
    spans = [Span(0, version, "w", DIGESTS[version][:16])]
    partial = Partial(
        [1, 2], [5, 6, 7, 8], [True, True, False, True], [-0.5, -0.25, 0.0, -1.0], spans, 1, "scoring", None, "stop", 0
    )
    return Finished(
        group=group, sample=sample, prompt_index=group, epoch=0, partial=partial, finish_reason="stop", status=status,
        error="", reward=float(sample) if status == "ok" else None, reward_parts={}, text="", attempts=0, finished_at=0,
    )  # fmt: skip


def committed(group: int, sample: int, version: int = 0, status: str = "ok", **changes: Any) -> dict[str, Any]:
    return {**finished(group, sample, version, status).row(), **changes}


def sample_row(step: int, group: int, sample: int) -> dict[str, Any]:
    return {
        "step": step, "group": group, "sample": sample, "advantage": 0.5, "staleness": 0, "tokens": 2,
        "mean_ratio": 1.0, "clip_fraction": None, "policy_loss": 0.1, "mean_logprob": -0.5, "commit_seq": -1,
    }  # fmt: skip


def claim(group: int, sample: int) -> Held:
    value = claims.drawn("w", 2)
    return Held(value, KeyValue(KEYS.claim(group, sample), value.dump(), 1, 1))


def decision(step: int, trained: list[int], retired: dict[int, str] | None = None) -> BatchDecision:
    name = f"batches/{step}"
    return BatchDecision(step=step, file=name, sha256=name, trained=trained, retired=retired or {}, decided_by="t")


def sound() -> Picture:
    """Two steps decided: group 0 trained, then group 1 trained and group 2 retired; group 3 committed by half, one
    sample of it registered; group 4 claimed."""
    decisions = [decision(0, [0]), decision(1, [1], {2: "error"})]
    experience = [committed(g, s, version=min(g, 1)) for g in (0, 1) for s in range(2)]
    experience += [committed(2, s, 1, "reward_error") for s in range(2)] + [committed(3, 0, 2)]
    return Picture(
        samples_per_prompt=2,
        on_version_lost="restart",
        cursor=5,
        claims=[claim(4, 0), claim(4, 1)],
        registered=[(3, 1)],
        experience=experience,
        head=TrainerHead(step=2, decided=2, checkpoint=-1, consumed_groups=3, state="running"),
        weights=WeightsHead(version=2, digest=DIGESTS[2], layout_digest="l", bytes=1, master=""),
        decisions=decisions,
        batch_files={d.file: d.sha256 for d in decisions},
        batch_groups={
            "batches/0": {0: Counter(train=2)},
            "batches/1": {1: Counter(train=2), 2: Counter(error=2)},
        },
        metrics=[{"version": v, "digest": DIGESTS[v]} for v in range(3)],
        steps=[{"step": g, "group": g, "sample": s} for g in (0, 1) for s in range(2)],
    )


def changed(index: int, **changes: Any) -> Callable[[Picture], Picture]:
    def change(picture: Picture) -> Picture:
        rows = [dict(r) for r in picture.experience]
        rows[index] |= changes
        return replace(picture, experience=rows)

    return change


def altered(**changes: Callable[[Any], Any]) -> Callable[[Picture], Picture]:
    return lambda picture: replace(picture, **{name: f(getattr(picture, name)) for name, f in changes.items()})


def test_a_sound_run_has_no_problem() -> None:
    report = check(sound())
    assert report.problems == [] and report.ok
    assert report.checked["groups drawn"] == 5 and report.checked["trajectories committed"] == 7


def test_a_run_that_has_just_begun_has_no_problem() -> None:
    assert check(Picture(samples_per_prompt=2, on_version_lost="continue")).ok


def missing_step(decisions: list[BatchDecision]) -> list[BatchDecision]:
    return [d.model_copy(update={"step": d.step + 1}) for d in decisions]


def rows_without_it(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "step": row["step"] + 1} for row in steps]


TWO: dict[str, Any] = {
    "span_start": [0, 3], "span_version": [0, 1], "span_worker": ["w"] * 2,
    "span_digest": [DIGESTS[0][:16], DIGESTS[1][:16]],
}  # fmt: skip
BROKEN: list[tuple[str, Callable[[Picture], Picture], str]] = [
    ("lost claim", altered(claims=lambda c: c[1:]), r"invariant 1: lost trajectories 1 \(\(4, 0\)\)"),
    ("lost registration", altered(registered=lambda _: []), r"invariant 1: lost trajectories 1 \(\(3, 1\)\)"),
    ("lost row", altered(experience=lambda e: e[:-1]), r"invariant 1: lost trajectories 1 \(\(3, 0\)\)"),
    ("claimed and committed", altered(claims=lambda c: [*c, claim(3, 0)]), r"in two places 1 \(\(3, 0\)\)"),
    ("registered and claimed", altered(registered=lambda r: [*r, (4, 1)]), r"in two places 1 \(\(4, 1\)\)"),
    ("committed twice", altered(experience=lambda e: [*e, e[0]]), r"in two places 1 \(\(0, 0\)\)"),
    ("never drawn", altered(registered=lambda r: [*r, (9, 0)]), r"never drawn 1 \(\(9, 0\)\)"),
    ("sample beyond the group", altered(registered=lambda r: [*r, (3, 2)]), r"never drawn 1 \(\(3, 2\)\)"),
    ("short mask", changed(0, policy_mask=[True] * 3), r"invariant 2: \(0, 0\) has 4 tokens, 3 mask, 4 logprobs"),
    ("long logprobs", changed(0, logprobs=[0.0] * 5), r"invariant 2: \(0, 0\) has 4 tokens, 4 mask, 5 logprobs"),
    ("NaN", changed(1, logprobs=[-1.0, float("nan"), 0.0, -1.0]), r"invariant 2: \(0, 1\) has a logprob that is not"),
    ("infinite", changed(1, logprobs=[float("-inf"), 0.0, 0.0, 0.0]), r"\(0, 1\) has a logprob that is not finite"),
    ("no span", changed(0, span_start=[], span_version=[], span_worker=[], span_digest=[]), "outside its spans"),
    ("late span", changed(0, span_start=[1]), r"invariant 2: \(0, 0\) has policy tokens outside its spans \[1\]"),
    ("span columns", changed(0, span_worker=["w", "v"]), r"\(0, 0\) has span columns of different lengths"),
    ("foreign weights", changed(0, span_digest=["abc"]), "written by weights that were never published: abc"),
    ("nobody's weights", changed(0, span_digest=[""]), "written by weights that were never published"),
    ("reward of an error", changed(4, reward=1.0), r"invariant 2: \(2, 0\) has status 'reward_error' and reward 1.0"),
    ("ok without reward", changed(0, reward=None), r"invariant 2: \(0, 0\) has status 'ok' and reward None"),
    (
        "weights of another version",
        changed(0, span_digest=[DIGESTS[1][:16]]),
        r"invariant 2: \(0, 0\) has a span of version 0 with the digest of version 1",
    ),
    (
        "two versions",
        changed(0, **TWO),
        r"invariant 3: \(0, 0\) has spans of versions \[0, 1\]",
    ),
    ("other file", altered(batch_files=lambda f: {**f, "batches/0": "x"}), "batches/0 is not the file that step 0"),
    (
        "half a group",
        altered(batch_groups=lambda b: {**b, "batches/0": {0: Counter(train=1)}}),
        r"invariant 4: step 0, group 0 has rows \{'train': 1\}, not train",
    ),
    (
        "undecided group",
        altered(batch_groups=lambda b: {**b, "batches/0": {**b["batches/0"], 3: Counter(train=2)}}),
        r"step 0, group 3 has rows \{'train': 2\}, not None",
    ),
    (
        "other use",
        altered(batch_groups=lambda b: {**b, "batches/1": {1: Counter(train=2), 2: Counter(train=2)}}),
        r"step 1, group 2 has rows \{'train': 2\}, not error",
    ),
    (
        "group missing in its file",
        altered(batch_groups=lambda b: {**b, "batches/0": {}}),
        r"step 0, group 0 has rows \{\}, not train",
    ),
    ("consumed twice", altered(decisions=lambda d: [*d, decision(2, [], {0: "error"})]), r"consumed twice 1 \(0\)"),
    ("missing step", altered(decisions=missing_step, steps=rows_without_it), r"are decided, there are .* 2 \(1, 2\)"),
    ("miscounted", altered(head=lambda h: h.model_copy(update={"consumed_groups": 4})), "3 groups are decided"),
    ("done too early", altered(head=lambda h: h.model_copy(update={"state": "done"})), "2 groups are neither"),
    ("recorded twice", altered(steps=lambda s: [*s, s[0]]), r"recorded twice 1 \(\(0, 0, 0\)\)"),
    ("no metrics", altered(metrics=lambda m: m[:2]), r"step_metrics has no row of the recorded steps 1 \(1\)"),
    ("no rows", altered(steps=lambda s: s[:2]), r"steps has no row of 2 trained .* of the recorded steps 1 \(1\)"),
    ("a row too few", altered(steps=lambda s: s[1:]), r"steps has no row of 1 trained .* the recorded steps 1 \(0\)"),
    ("version twice", altered(metrics=lambda m: [*m, m[1]]), r"invariant 5: versions recorded twice 1 \(1\)"),
    (
        "two digests",
        altered(metrics=lambda m: [*m[:2], {"version": 2, "digest": "e" * 64}]),
        "invariant 5: version 2 was published as 0000000000000002, recorded as eeee",
    ),
    (
        "version from the future",
        changed(0, span_version=[7]),
        r"invariant 5: trajectories of versions that were never published 1 \(7\)",
    ),
    ("unreadable file", altered(unreadable=lambda u: ["incoming/x: torn"]), "incoming/x: torn"),
]


@pytest.mark.parametrize(("change", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_broken_invariant_is_named(change: Callable[[Picture], Picture], message: str) -> None:
    problems = check(change(sound())).problems
    assert len(problems) == 1 and re.search(message, problems[0]), problems


def test_rows_of_a_step_may_be_registered_and_those_of_errors_and_of_a_step_to_be_recorded_are_not_there() -> None:
    registered = {(r["step"], r["group"], r["sample"]) for r in sound().steps}
    assert check(replace(sound(), steps=[], registered_steps=registered)).ok
    failed = changed(0, status="reward_error", reward=None)(sound())
    assert check(replace(failed, steps=sound().steps[1:])).ok, "the learner never sees it"
    unrecorded = replace(sound(), head=sound().head.model_copy(update={"step": 1}))
    assert check(replace(unrecorded, steps=sound().steps[:2])).ok


def test_spans_of_several_versions_are_sound_if_the_config_says_so() -> None:
    assert check(replace(changed(0, **TWO)(sound()), on_version_lost="continue")).ok
    assert check(replace(changed(0, **TWO)(sound()), update="interrupt")).ok
    assert "invariant 3" in check(changed(0, **TWO)(sound())).problems[0]


def test_a_version_that_was_offered_again_under_another_digest_is_known() -> None:
    picture = changed(0, span_digest=["a" * 16])(sound())
    assert not check(picture).ok
    assert not check(replace(picture, offered={1: {"a" * 64}})).ok, "of another version than its span says"
    assert check(replace(picture, offered={0: {"a" * 64}})).ok


def test_many_problems_of_a_kind_are_one_line() -> None:
    problems = check(replace(sound(), cursor=100)).problems
    assert len(problems) == 1 and "190 (" in problems[0] and problems[0].endswith("…)")


# -- gathering --------------------------------------------------------------------------------------------------


class Store:
    """A run on the twin: five groups drawn; one committed and trained, one committed, one registered, two claimed."""

    def __init__(self, start: Callable[..., Awaitable[Any]]) -> None:
        self.start = start
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.tables = {name: MemoryTable(schema) for name, schema in TABLES.items()}

    async def make(self) -> None:
        self.w = await self.start(self.server, KEYS, "rollout-a")
        held = await self.w.ledger.draw(groups=lambda cursor: 5, samples_per_prompt=2, version=0)
        committer = await self.start(self.server, KEYS, "c", "committer")
        trainer = await self.start(self.server, KEYS, "t", "trainer")
        self.committers = [
            TableCommitter(
                name, schema, self.tables[name], committer.coordination, KEYS, committer.ledger, self.storage
            )
            for name, schema in TABLES.items()
        ]
        await self.finish("w-0", held[:4])
        await self.commit()
        await trainer.ledger.guarded_put(
            KEYS.weights,
            WeightsHead(version=0, digest=DIGESTS[0], layout_digest="l", bytes=1, master=""),
            claims.absent(KEYS.weights),
        )
        steps = StepLog(trainer.coordination, KEYS, trainer.ledger, self.storage)
        await steps.record_initial("t", DIGESTS[0], 0)
        rows = (await self.tables["experience"].read()).slice(0, 2)
        await steps.decide(0, rows.append_column("use", pa.array(["train"] * 2)).cast(BATCH), [0], {})
        await steps.record(0, "t", [sample_row(0, 0, s) for s in range(2)], {}, 1, DIGESTS[1], 0)
        await self.commit()
        await self.finish("w-1", held[4:6])
        self.steps = steps

    async def finish(self, segment: str, held: list[Held]) -> None:
        incoming = await write_incoming(self.storage, "w", segment, [finished(*h.id) for h in held])
        assert await self.w.ledger.finish(held, segment, incoming) == []

    async def commit(self) -> None:
        for committer in self.committers:
            while await committer.registered():
                await committer.run_once()

    async def gather(self) -> Picture:
        return await gather(
            self.w.coordination, KEYS, self.storage, self.tables, samples_per_prompt=2, on_version_lost="restart"
        )


@pytest.fixture
async def store(start: Callable[..., Awaitable[Any]]) -> Store:
    made = Store(start)
    await made.make()
    return made


async def test_a_run_is_gathered_from_etcd_and_the_store(store: Store) -> None:
    report = check(await store.gather())
    assert report.problems == []
    assert report.checked == {
        "groups drawn": 5, "trajectories committed": 4, "registered": 2, "claimed": 4, "batches decided": 1,
        "versions recorded": 2, "leftovers of ended workers": 0,
    }  # fmt: skip


async def test_rows_of_an_announced_commit_count_as_committed_once_its_key_is_in_the_history(store: Store) -> None:
    table = store.tables["experience"]
    table.lose_reply = True
    with pytest.raises(Exception, match="was lost"):
        await store.committers[0].run_once()
    report = check(await store.gather())
    assert report.problems == [] and report.checked["trajectories committed"] == 6 and not report.checked["registered"]
    await store.committers[0].run_once()
    assert check(await store.gather()).problems == []


async def test_rows_committed_beyond_what_etcd_knows_are_seen_to_be_double(store: Store) -> None:
    """A late commit that nobody had announced."""
    store.tables["experience"].unfenced = True
    rows = (await store.tables["experience"].read()).slice(0, 1)
    await store.tables["experience"].commit(rows, target=1, key="late")
    assert any("in two places" in p for p in check(await store.gather()).problems)


async def test_a_living_run_can_be_audited_while_it_commits(store: Store) -> None:
    """A segment that was registered when etcd was read, and committed before its file was."""
    real = store.storage.read

    async def read(path: str) -> bytes:
        if path.startswith("incoming/"):
            store.storage.read = real  # type: ignore[method-assign]
            await store.commit()
        return await real(path)

    store.storage.read = read  # type: ignore[method-assign]
    report = check(await store.gather())
    assert report.problems == [] and report.checked["registered"] == 2
    assert check(await store.gather()).checked["trajectories committed"] == 6


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_a_registered_segment_that_cannot_be_read_is_reported(store: Store, how: str) -> None:
    path = "incoming/experience/w-1.arrow"
    if how == "missing":
        await store.storage.delete(path)
    else:
        store.storage.damage(path, 2500, b"\xaa\x55\xaa")
    problems = check(await store.gather()).problems
    assert len(problems) == 1 and path in problems[0]


async def step_to_commit(store: Store) -> None:
    rows = (await store.tables["experience"].read()).slice(2, 2)
    await store.steps.decide(1, rows.append_column("use", pa.array(["train"] * 2)).cast(BATCH), [1], {})
    await store.steps.record(1, "t", [sample_row(1, 1, s) for s in range(2)], {}, 2, DIGESTS[1], 0)
    assert check(await store.gather()).problems == []


HOW = pytest.mark.parametrize("how", ["flipped", "missing", "truncated"])
LOST = {
    "steps": (2, "table steps has no row of 2 trained trajectories of the recorded steps 1 (1)"),
    "step_metrics": (1, "table step_metrics has no row of the recorded steps 1 (1)"),
}


@HOW
@pytest.mark.parametrize("folder", ["incoming", "incoming/copies"])
@pytest.mark.parametrize("table", LOST)
async def test_what_a_step_left_is_there_as_long_as_one_of_its_files_is(
    store: Store, table: str, folder: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    await step_to_commit(store)
    await store.storage.spoil(how, f"{folder}/{table}/t-step-000000001.arrow")
    assert check(await store.gather()).problems == []
    said = [r.getMessage() for r in caplog.records if "its copy is used" in r.getMessage()]
    assert len(said) == (folder == "incoming")
    await store.commit()
    picture = await store.gather()
    assert check(picture).problems == [] and picture.left_over == []


@HOW
@pytest.mark.parametrize("table", LOST)
async def test_what_a_step_left_and_both_files_lost_is_reported_before_and_after(
    store: Store, table: str, how: str
) -> None:
    await step_to_commit(store)
    name = f"{table}/t-step-000000001.arrow"
    await store.storage.spoil(how, f"incoming/{name}", f"incoming/copies/{name}")
    rows, lost = LOST[table]
    before = check(await store.gather()).problems
    assert before[1:] == [lost]
    assert name in before[0] and f"its {rows} rows of table {table} would be lost" in before[0]
    await store.commit()
    assert check(await store.gather()).problems == [lost]


async def test_a_copy_that_is_not_registered_is_left_over(store: Store) -> None:
    await store.storage.write("incoming/copies/steps/gone-step-000000009.arrow", b"x")
    assert (await store.gather()).left_over == ["incoming/copies/steps/gone-step-000000009.arrow"]


async def test_a_damaged_batch_file_is_reported(store: Store) -> None:
    path = next(f.path for f in await store.storage.list("batches") if f.path.endswith(".arrow"))
    store.storage.damage(path, 2500, b"\xaa\x55\xaa")
    problems = check(await store.gather()).problems
    assert len(problems) == 2 and path in problems[0] and "is not the file that step 0 decided" in problems[1]


async def test_a_batch_file_that_no_checkpoint_needs_may_be_gone(store: Store) -> None:
    path = next(f.path for f in await store.storage.list("batches") if f.path.endswith(".arrow"))
    await store.storage.delete(path)
    [problem] = check(await store.gather()).problems
    assert path in problem
    await store.storage.write("checkpoints/step-000000001/checkpoint.json", b"{}")
    picture = await store.gather()
    assert check(picture).problems == [] and picture.removed == {path}
    picture.experience = [r for r in picture.experience if (r["group"], r["sample"]) != (0, 0)]
    assert "invariant 4: step 0 has no file, nor the experience its groups 1 (0)" in check(picture).problems


async def test_decisions_and_offers_in_the_archive_count_as_those_in_etcd(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "BLOCK", 1)
    [decision] = (await store.gather()).decisions
    await write_block(store.storage, [ArchivedStep(decision=decision, offered=["drifted"])])
    both = await store.gather()
    assert check(both).problems == [] and both.decisions == [decision]
    await store.w.coordination.delete(KEYS.batch(0))
    archived = await store.gather()
    assert check(archived).problems == [] and archived.decisions == [decision] and archived.offered == {0: {"drifted"}}


async def test_a_trajectory_that_waits_for_a_worker_that_does_not_know_it_is_named(store: Store) -> None:
    held = (await store.gather()).claims[0]
    owner = held.claim.owner
    await store.w.coordination.put(held.kv.key, claims.reassigned(held.claim, owner, "move").dump())
    [problem] = check(await store.gather()).problems
    assert f"wait for a worker that does not know it 1 ({held.id})" in problem
    await store.w.coordination.put(KEYS.inbox_item(owner, *held.id), "2")
    assert check(await store.gather()).ok


async def test_files_of_the_dead_that_nothing_refers_to_are_counted(store: Store) -> None:
    """Invariant 7, as far as one look can tell: the manager removes them in bounded time."""
    for path in ("partials/gone/000000.arrows", "partials/rollout-a/000000.arrows", "incoming/experience/gone-7.arrow"):
        await store.storage.write(path, b"x")
    await store.storage.write("batches/000000001-gone.arrow", b"x")
    picture = await store.gather()
    assert picture.left_over == ["partials/gone", "incoming/experience/gone-7.arrow", "batches/000000001-gone.arrow"]
    store.w.kill()
    assert "partials/rollout-a" not in (await store.gather()).left_over, "claims still name its log"
