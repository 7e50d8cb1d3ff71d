"""Partial logs: whatever instant the owner dies at, what is left is a prefix of what it had."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar.buffer.partials import (
    Partial,
    PartialLog,
    PartialRow,
    Span,
    assemble,
    from_batch,
    read_partials,
    to_batch,
)
from laminar.buffer.storage import MemoryStorage
from laminar.errors import StoreError


def row(role: str, offset: int, tokens: list[int], **changes: object) -> PartialRow:
    base = PartialRow(
        group=7,
        sample=1,
        term=2,
        turn=0,
        offset=offset,
        role=role,
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens) if role == "policy" else [],
        version=3,
        digest="d3",
        worker="w",
        finish_reason=None,
        turn_state="generating",
        environment_state=None,
        started_at=1_780_000_000_000_000,
        at=1_780_000_000_500_000,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


PROMPT = row("prompt", 0, [100, 101], environment_state="s0")


def test_rows_survive_the_round_trip_through_arrow() -> None:
    rows = [PROMPT, row("policy", 0, [1, 2], logprobs=[-0.25, -1.5], finish_reason="stop")]
    assert from_batch(to_batch(rows)) == rows


def test_mask_logprobs_and_tokens_grow_together() -> None:
    """Case 25: a trajectory of 2 tokens resumes and gets 3 more; mask, logprobs and tokens are all 5 long."""
    partial = assemble([PROMPT, row("policy", 0, [1, 2]), row("policy", 2, [3, 4, 5])])
    assert partial.token_ids == [1, 2, 3, 4, 5]
    assert len(partial.policy_mask) == len(partial.logprobs) == 5
    assert partial.spans == [Span(0, 3, "w", "d3")]


def test_an_abort_before_the_first_token_is_legal() -> None:
    """Case 48: aborted during prefill, with no token yet; it resumes from the prompt."""
    partial = assemble([PROMPT])
    assert partial == Partial([100, 101], [], [], [], [], 0, "generating", "s0", None, 1_780_000_000_000_000)
    assert assemble([]).prompt_ids == []


def test_turns_masks_spans_and_states() -> None:
    partial = assemble(
        [
            PROMPT,
            row("policy", 0, [1, 2], version=3),
            row("policy", 2, [], finish_reason="stop", turn_state="acting"),
            row("environment", 2, [9, 9], turn=1, environment_state="s1"),
            row("policy", 4, [3], turn=1, version=4, digest="d4", worker="v"),
        ]
    )
    assert partial.policy_mask == [True, True, False, False, True]
    assert partial.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert partial.spans == [Span(0, 3, "w", "d3"), Span(4, 4, "v", "d4")]
    assert (partial.turn, partial.turn_state, partial.finish_reason) == (1, "generating", None)
    assert partial.environment_state == "s1"


def test_the_end_of_generation_is_in_the_log_before_the_reply() -> None:
    partial = assemble(
        [PROMPT, row("policy", 0, [1]), row("policy", 1, [], finish_reason="length", turn_state="acting")]
    )
    assert (partial.turn_state, partial.finish_reason) == ("acting", "length")


def test_a_later_row_that_begins_lower_replaces() -> None:
    rows = [PROMPT, row("policy", 0, [1, 2, 3]), row("policy", 1, [7], version=4), row("policy", 2, [8], version=4)]
    partial = assemble(rows)
    assert partial.token_ids == [1, 7, 8]
    assert partial.spans == [Span(0, 3, "w", "d3"), Span(1, 4, "w", "d3")]
    afresh = assemble([*rows, row("prompt", 0, [200], environment_state="new")])
    assert afresh.prompt_ids == [200] and afresh.token_ids == [] and afresh.environment_state == "new"


def test_rows_after_a_gap_are_left_out_and_said() -> None:
    rows = [PROMPT, row("policy", 0, [1, 2]), row("policy", 5, [6], finish_reason="stop", turn_state="acting")]
    partial = assemble(rows)
    assert partial.token_ids == [1, 2] and partial.gap_at == 2
    assert (partial.turn_state, partial.finish_reason) == ("generating", None)
    healed = assemble([*rows, PROMPT, row("policy", 0, [1, 2, 3, 4, 5, 6])])
    assert healed.token_ids == [1, 2, 3, 4, 5, 6] and healed.gap_at is None
    assert assemble([row("policy", 0, [1])]).gap_at == 0, "without its prompt a trajectory cannot go on"


def test_contradictory_rows_are_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"000000000007-001 at offset 0 has 2 tokens and 1 logprobs"):
        to_batch([row("policy", 0, [1, 2], logprobs=[-0.5])])
    with pytest.raises(StoreError, match="role 'tool'"):
        to_batch([row("tool", 0, [])])
    with pytest.raises(StoreError, match="2 trajectories or terms"):
        assemble([PROMPT, row("policy", 0, [1], term=3)])


# -- logs -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["append", "objects"])
def storage(request: pytest.FixtureRequest) -> MemoryStorage:
    return MemoryStorage(supports_append=request.param == "append")


async def test_flushed_rows_are_read_by_trajectory_and_term(storage: MemoryStorage) -> None:
    log = PartialLog(storage, "w", sync=True)
    await log.append([PROMPT, replace(PROMPT, sample=2)])
    await log.append([])
    await log.append([row("policy", 0, [1]), row("policy", 0, [5], sample=2, term=3)])
    found = await read_partials(storage, "w")
    assert {k: len(v) for k, v in found.rows.items()} == {(7, 1, 2): 2, (7, 2, 2): 1, (7, 2, 3): 1}
    assert found.damage == [] and found.bytes == storage.used_bytes
    assert (await read_partials(storage, "nobody")).rows == {}


async def test_only_what_is_wanted_of_a_log_is_read(storage: MemoryStorage) -> None:
    """Of many that share it, of their groups and terms too: the same rows in the same order as in all of it."""
    log = PartialLog(storage, "w", sync=True)
    everybody = [(group, sample, term) for group in range(6) for sample in range(2) for term in (1, 2)]
    for tokens in range(4):
        await log.append(
            [
                row("policy", tokens, [100 * g + 10 * s + t, tokens], group=g, sample=s, term=t)
                for g, s, t in everybody
                if (g + s + t + tokens) % 3
            ]
        )
        if tokens == 1:
            await log.rotate([row("policy", 0, [1], group=9)])
    whole = (await read_partials(storage, "w")).rows
    wanted = {(1, 0, 2), (4, 1, 1), (4, 0, 1), (9, 1, 2), (7, 7, 7)}
    found = await read_partials(storage, "w", wanted)
    assert found.rows == {key: rows for key, rows in whole.items() if key in wanted} and len(found.rows) == 4
    assert found.bytes == storage.used_bytes
    assert (await read_partials(storage, "w", ())).rows == {}


async def test_another_worker_whose_name_begins_alike_is_another_worker(storage: MemoryStorage) -> None:
    await PartialLog(storage, "w1", sync=True).append([PROMPT])
    await PartialLog(storage, "w10", sync=True).append([PROMPT, replace(PROMPT, sample=2)])
    assert len((await read_partials(storage, "w1")).rows) == 1


async def test_rotation_carries_live_rows_and_keeps_old_segments_until_told(storage: MemoryStorage) -> None:
    """A trajectory that was handed over, and not yet copied by its new owner, is in the old segment alone."""
    log = PartialLog(storage, "w", sync=True, rotate_bytes=4000)
    moved = replace(PROMPT, sample=9)
    await log.append([PROMPT, moved])
    assert not log.due_for_rotation()
    while not log.due_for_rotation():
        await log.append([row("policy", 0, [1, 2])])
    old = await log.rotate([PROMPT, row("policy", 0, [1, 2, 3])])
    assert old == ["partials/w/000000.arrows"] and not log.due_for_rotation()
    await log.append([row("policy", 3, [4])])
    found = await read_partials(storage, "w")
    assert assemble(found.rows[7, 1, 2]).token_ids == [1, 2, 3, 4]
    assert (7, 9, 2) in found.rows
    await log.discard_superseded()
    found = await read_partials(storage, "w")
    assert assemble(found.rows[7, 1, 2]).token_ids == [1, 2, 3, 4]
    assert (7, 9, 2) not in found.rows and log.superseded == []


async def test_a_log_is_due_for_rotation_by_age() -> None:
    log = PartialLog(MemoryStorage(), "w", sync=True, rotate_s=0.0)
    assert not log.due_for_rotation(), "nothing to rotate"
    await log.append([PROMPT])
    assert log.due_for_rotation()
    await log.rotate([])
    assert not log.due_for_rotation()


async def test_a_full_disk_loses_nothing_and_the_same_flush_is_tried_again(storage: MemoryStorage) -> None:
    log = PartialLog(storage, "w", sync=True)
    await log.append([PROMPT])
    storage.capacity = storage.used_bytes
    for _ in range(3):
        with pytest.raises(StoreError, match="no space"):
            await log.append([row("policy", 0, [1])])
    with pytest.raises(StoreError, match="no space"):
        await log.rotate([PROMPT])
    assert log.superseded == []
    storage.capacity = None
    await log.append([row("policy", 0, [1])])
    await log.append([row("policy", 1, [2])])
    found = await read_partials(storage, "w")
    assert assemble(found.rows[7, 1, 2]).token_ids == [1, 2] and found.damage == []
    assert await log.rotate([PROMPT, row("policy", 0, [1, 2])]) != []
    await log.discard_superseded()
    assert assemble((await read_partials(storage, "w")).rows[7, 1, 2]).token_ids == [1, 2]


async def test_segments_whose_end_could_not_be_written_are_superseded_by_the_next_rotation(
    storage: MemoryStorage,
) -> None:
    log = PartialLog(storage, "w", sync=True)
    await log.append([PROMPT])

    def full(verb: str, path: str) -> None:
        if verb in ("append", "write"):
            storage.fault = None
            raise StoreError("no space")

    storage.fault = full
    with pytest.raises(StoreError, match="no space"):
        await log.rotate([PROMPT])
    await log.rotate([PROMPT])
    await log.discard_superseded()
    assert {f.path.rpartition("/")[2][:6] for f in await storage.list("partials/w")} == {log._current[0][-13:-7]}
    assert assemble((await read_partials(storage, "w")).rows[7, 1, 2]).prompt_ids == [100, 101]


async def test_a_log_that_rotates_while_it_is_read_is_read_again(storage: MemoryStorage) -> None:
    log = PartialLog(storage, "w", sync=True)
    await log.append([PROMPT, row("policy", 0, [1])])
    await log.rotate([PROMPT, row("policy", 0, [1, 2])])
    old = [f.path for f in await storage.list("partials/w") if "000000" in f.path.split("/")[-1][:6]]

    def deleted_under_the_reader(verb: str, path: str) -> None:
        if verb == "read":
            storage.fault = None
            for name in old:
                storage._files.pop(name)

    storage.fault = deleted_under_the_reader
    found = await read_partials(storage, "w")
    assert assemble(found.rows[7, 1, 2]).token_ids == [1, 2]


async def test_damage_is_reported_and_other_segments_still_count() -> None:
    storage = MemoryStorage()
    log = PartialLog(storage, "w", sync=True)
    await log.append([PROMPT])
    size = storage.used_bytes
    await log.append([row("policy", 0, [1])])
    await log.append([row("policy", 1, [2])])
    await log.rotate([PROMPT, row("policy", 0, [1, 2])])
    storage.damage("partials/w/000000.arrows", size + 300, b"\xaa\x55")
    found = await read_partials(storage, "w")
    assert len(found.damage) == 1 and "partials/w/000000.arrows" in found.damage[0]
    assert assemble(found.rows[7, 1, 2]).token_ids == [1, 2]


# -- any history ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """A trajectory's rows in order, and after how many of them the owner flushes or rotates."""

    rows: list[PartialRow]
    flush_after: list[int]
    rotate_after: list[int]
    lost_tail: float
    zeroed: bool
    objects: bool


@st.composite
def histories(draw: st.DrawFn) -> History:
    rows, offset, turn = [PROMPT], 0, 0
    for _ in range(draw(st.integers(0, 12))):
        role = draw(st.sampled_from(["policy", "policy", "policy", "environment"]))
        turn += role == "environment"
        tokens = draw(st.lists(st.integers(0, 50_000), min_size=int(role == "environment"), max_size=5))
        version = draw(st.sampled_from([3, 3, 3, 4]))
        state = f"s{turn}" if role == "environment" else None
        rows.append(row(role, offset, tokens, turn=turn, version=version, environment_state=state))
        offset += len(tokens)
    places = st.lists(st.integers(0, len(rows)), max_size=6)
    return History(rows, draw(places), draw(places), draw(st.floats(0, 1)), draw(st.booleans()), draw(st.booleans()))


def joined(partial: Partial) -> list[tuple[int, bool, float, int]]:
    """(token, mask, logprob, version) for each token: what a prefix must agree in."""
    versions = [0] * len(partial.token_ids)
    for span in partial.spans:
        versions[span.start :] = [span.version] * (len(versions) - span.start)
    masked = [v if m else 0 for v, m in zip(versions, partial.policy_mask, strict=True)]
    return list(zip(partial.token_ids, partial.policy_mask, partial.logprobs, masked, strict=True))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
async def test_any_split_into_flushes_with_rotations_and_a_torn_tail_gives_a_prefix(history: History) -> None:
    storage = MemoryStorage(supports_append=not history.objects)
    log = PartialLog(storage, "w", sync=False)
    flushed, durable = 0, 0
    for count in range(1, len(history.rows) + 1):
        if count in history.flush_after or count in history.rotate_after:
            await log.append(history.rows[flushed:count])
            flushed = count
        if count in history.rotate_after:
            await log.rotate(history.rows[:count])
            await log.discard_superseded()
            for file in storage._files.values():
                file.synced = len(file.data)
            durable = count
    storage.crash(keep_unsynced=history.lost_tail, zeroed=history.zeroed)

    found = await read_partials(storage, "w")
    assert found.damage == []
    left = assemble(found.rows.get((7, 1, 2), []))
    whole, at_least = assemble(history.rows), assemble(history.rows[:durable])
    assert left.gap_at is None
    assert joined(left) == joined(whole)[: len(left.token_ids)]
    assert len(left.token_ids) >= len(at_least.token_ids)
    if history.objects or history.lost_tail == 1:
        assert left == assemble(history.rows[:flushed])


@pytest.mark.slow
async def test_256_logs_of_a_long_run_are_read_back_fast() -> None:
    storage = MemoryStorage()
    log = PartialLog(storage, "w", sync=True)
    draw = random.Random(1)
    lengths = [0] * 256
    for _ in range(40):
        rows = []
        for sample in range(256):
            tokens = [draw.randrange(50_000) for _ in range(40)]
            rows += [replace(PROMPT, sample=sample)] if not lengths[sample] else []
            rows.append(row("policy", lengths[sample], tokens, sample=sample))
            lengths[sample] += 40
        await log.append(rows)
    found = await read_partials(storage, "w")
    assert all(len(assemble(found.rows[7, s, 2]).token_ids) == 1600 for s in range(256))
    assert storage.used_bytes / (256 * 1600) < 20, "bytes a token"
