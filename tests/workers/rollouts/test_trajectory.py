"""A trajectory in memory and in the log are the same, over turns, flushes, aborts and changes of owner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import KeyValue
from laminar.buffer.experience import Finished
from laminar.buffer.keys import Keys
from laminar.buffer.partials import PartialRow, Span, assemble
from laminar.workers.environments.base import Message
from laminar.workers.rollouts.trajectory import Trajectory

QUESTION: list[Message] = [{"role": "user", "content": "3*7+1"}]
OBSERVATION: list[Message] = [{"role": "tool", "content": "21"}]


def trajectory(worker: str = "a", version: int = 3, term: int = 1, at: int = 1000) -> Trajectory:
    claim = claims.drawn(worker, version).model_copy(update={"term": term})
    held = Held(claim, KeyValue(Keys("run").claim(7, 1), claim.dump(), 1, 1))
    return Trajectory(held=held, worker=worker, version=version, digest=f"digest-{version}", started_at=at)


def begun(**changes: int) -> Trajectory:
    t = trajectory(**changes)  # type: ignore[arg-type]
    t.begin([100, 101, 102], QUESTION, "state-0", at=1001)
    return t


def adopted(rows: list[PartialRow], worker: str, version: int, term: int) -> Trajectory:
    """What a new owner holds after reading the old one's log; its own copy of the rows is pending."""
    t = trajectory(worker, version, term, at=9000)
    if rows:
        t.restore(assemble(rows))
    t.pending = t.all_rows(at=9001)
    return t


def test_one_turn_is_in_the_log_as_it_is_in_memory() -> None:
    t = begun()
    rows = t.take_pending()
    assert assemble(rows) == t.partial()
    t.policy_wrote([1, 2], [-0.5, -0.25], at=1002)
    t.policy_wrote([3], [-1.0], at=1003)
    rows += t.take_pending()
    assert assemble(rows) == t.partial()
    t.generation_ended("stop", at=1004)
    rows += t.take_pending()
    assert assemble(rows) == t.partial() and assemble(rows).turn_state == "acting"
    t.ready_to_score("stop", "state-0", "22", at=1005)
    rows += t.take_pending()
    assert assemble(rows) == t.partial() and assemble(rows).turn_state == "scoring"
    assert [m["content"] for m in t.messages] == ["3*7+1", "22"]
    assert t.take_pending() == [] and (t.turn, t.policy_tokens) == (0, 3)


def two_turns(t: Trajectory) -> None:
    t.policy_wrote([1, 2], [-0.5, -0.25], at=1002)
    t.generation_ended("stop", at=1003)
    t.environment_replied([50, 51, 52], OBSERVATION, "state-1", "<calc>3*7</calc>", at=1004)
    t.policy_wrote([3, 4], [-1.0, -2.0], at=1005)


def test_turns_are_told_apart_by_the_mask() -> None:
    t = begun()
    two_turns(t)
    assert t.policy_mask == [True, True, False, False, False, True, True]
    assert t.logprobs == [-0.5, -0.25, 0.0, 0.0, 0.0, -1.0, -2.0]
    assert t.replies() == [[1, 2], [3, 4]] and t.turn_tokens() == [3, 4]
    assert (t.turn, t.turn_state, t.finish_reason) == (1, "generating", None)
    assert assemble(t.take_pending()) == t.partial()
    assert t.spans == [Span(0, 3, "a", "digest-3")], "one writer under one version is one span, over turns too"


def test_tokens_streamed_between_two_flushes_are_one_row() -> None:
    t = begun()
    for n in range(50):
        t.policy_wrote([n], [-0.1], at=1002 + n)
    rows = t.take_pending()
    assert [(r.role, len(r.token_ids)) for r in rows] == [("prompt", 3), ("policy", 50)]
    assert rows[1].environment_state is None, "streamed tokens do not repeat the environment's state"


def test_the_end_of_a_turn_is_a_row_of_its_own_state() -> None:
    t = begun()
    t.policy_wrote([1], [-0.1], at=1002)
    t.generation_ended("length", at=1003)
    assert [(r.turn_state, r.finish_reason) for r in t.take_pending()] == [
        ("generating", None), ("generating", None), ("acting", "length"),
    ]  # fmt: skip


def test_a_trajectorys_version_is_that_of_its_oldest_generated_token() -> None:
    """Case 2: prompt tokens have no version, response tokens 4, 4, 5: the trajectory's version is 4."""
    old = begun(version=4)
    old.policy_wrote([1, 2], [-0.5, -0.5], at=1002)
    t = adopted(old.take_pending(), "b", 5, 2)
    assert t.spans == [Span(0, 4, "a", "digest-4")]
    t.policy_wrote([3], [-0.5], at=9002)
    row = Finished(
        group=7, sample=1, prompt_index=0, epoch=0, partial=t.partial(), finish_reason="stop", status="ok", error="",
        reward=1.0, reward_parts={}, text="", attempts=0, finished_at=0,
    ).row()  # fmt: skip
    assert (row["version"], row["span_start"], row["span_version"]) == (4, [0, 2], [4, 5])
    assert (row["span_worker"], row["span_digest"]) == (["a", "b"], ["digest-4", "digest-5"])


def test_a_trajectory_that_was_aborted_has_its_version() -> None:
    """Case 4: aborted at token 3: its span still has a version."""
    t = begun(version=6)
    t.policy_wrote([1, 2, 3], [-0.5] * 3, at=1002)
    assert assemble(t.take_pending()).spans == [Span(0, 6, "a", "digest-6")]


def test_a_resumed_trajectory_has_everything_as_long() -> None:
    """Case 25: a trajectory of 2 tokens resumes and gets 3 more: mask, logprobs and tokens are all 5 long."""
    old = begun()
    old.policy_wrote([1, 2], [-0.5, -0.25], at=1002)
    t = adopted(old.take_pending(), "b", 3, 2)
    rows = t.take_pending()
    t.policy_wrote([3, 4, 5], [-1.0, -2.0, -3.0], at=9002)
    rows += t.take_pending()
    partial = assemble(rows)
    assert partial == t.partial() and partial.token_ids == [1, 2, 3, 4, 5]
    assert len(partial.policy_mask) == len(partial.logprobs) == 5
    assert partial.spans == [Span(0, 3, "a", "digest-3"), Span(2, 3, "b", "digest-3")]
    assert (partial.started_at, t.started_at) == (1000, 1000), "it began when its first owner began it"


def test_an_abort_before_the_first_token_resumes_from_the_prompt() -> None:
    """Case 48: aborted during prefill, no token yet: legal, resumes."""
    t = adopted(begun().take_pending(), "b", 4, 2)
    assert (t.prompt_ids, t.token_ids, t.spans, t.turn_state) == ([100, 101, 102], [], [], "generating")
    assert t.messages == QUESTION and t.environment_state == "state-0"
    assert assemble(t.take_pending()) == t.partial()
    t.policy_wrote([1], [-0.5], at=9002)
    assert t.spans == [Span(0, 4, "b", "digest-4")]


def test_an_owner_that_left_nothing_leaves_a_new_trajectory() -> None:
    t = adopted([], "b", 4, 2)
    assert t.prompt_ids == [] and t.take_pending() == []
    assert t.all_rows(at=1) == []


@pytest.mark.parametrize("state", ["generating", "acting", "second turn", "scoring"])
def test_a_new_owner_goes_on_where_the_last_one_was(state: str) -> None:
    old = begun()
    old.policy_wrote([1, 2], [-0.5, -0.25], at=1002)
    if state != "generating":
        old.generation_ended("stop", at=1003)
    if state == "second turn":
        old.environment_replied([50], OBSERVATION, "state-1", "x", at=1004)
    if state == "scoring":
        old.ready_to_score("stop", "state-9", "x", at=1004)
    t = adopted(old.take_pending(), "b", 5, 2)
    rows = t.take_pending()
    assert {(r.term, r.group, r.sample) for r in rows} == {(2, 7, 1)}
    assert t.partial() == old.partial() == assemble(rows)
    assert (t.messages, t.environment_state, t.turn, t.turn_state, t.finish_reason) == (
        old.messages, old.environment_state, old.turn, old.turn_state, old.finish_reason,
    )  # fmt: skip


def test_all_rows_supersede_what_is_pending() -> None:
    """A rotation carries what memory holds; rows that were still pending then come once more and change nothing."""
    t = begun()
    t.policy_wrote([1, 2], [-0.5, -0.25], at=1002)
    t.take_pending()
    t.policy_wrote([3], [-1.0], at=1003)
    carried = t.all_rows(at=1004)
    assert assemble(carried) == t.partial()
    t.policy_wrote([4], [-1.5], at=1005)
    assert assemble([*carried, *t.take_pending()]) == t.partial()


# -- any history ------------------------------------------------------------------------------------------------

Tokens = st.lists(st.integers(0, 1000), max_size=4)
Step = st.one_of(
    st.tuples(st.just("write"), Tokens),
    st.tuples(st.just("end"), st.sampled_from(["stop", "length"])),
    st.tuples(st.just("reply"), Tokens),
    st.tuples(st.just("score"), st.none()),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("rotate"), st.none()),
    st.tuples(st.just("adopt"), st.integers(0, 5)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(Step, max_size=40))
def test_log_and_memory_agree_after_any_history(steps: list[tuple[str, object]]) -> None:
    t, term = begun(), 1
    durable: list[PartialRow] = []  # of the present owner's term
    for n, (do, value) in enumerate(steps):
        if do == "write" and t.turn_state == "generating":
            t.policy_wrote(value, [-0.5 - n] * len(value), at=n)  # type: ignore[arg-type]
        elif do == "end" and t.turn_state == "generating":
            t.generation_ended(str(value), at=n)
        elif do == "reply" and t.turn_state == "acting":
            t.environment_replied(value, OBSERVATION, f"state-{n}", "reply", at=n)  # type: ignore[arg-type]
        elif do == "score" and t.turn_state == "acting":
            t.ready_to_score(t.finish_reason or "stop", f"state-{n}", "reply", at=n)
        elif do == "flush":
            durable += t.take_pending()
        elif do == "rotate":
            durable = t.all_rows(at=n)
        elif do == "adopt":
            term += 1
            before = t
            t = adopted(durable, f"owner-{term}", int(value), term)  # type: ignore[call-overload]
            durable = t.take_pending()
            assert before.token_ids[: len(t.token_ids)] == t.token_ids, "what was not flushed is lost, no more"
            if not t.prompt_ids:
                t.begin([100, 101, 102], QUESTION, "state-0", at=n)
        check(t)
    assert assemble([*durable, *t.take_pending()]) == t.partial()
    assert assemble(t.all_rows(at=0)) == t.partial()


def check(t: Trajectory) -> None:
    assert len(t.token_ids) == len(t.policy_mask) == len(t.logprobs)
    assert all((logprob == 0) != policy for logprob, policy in zip(t.logprobs, t.policy_mask, strict=True))
    assert sorted({s.start for s in t.spans}) == [s.start for s in t.spans]
    if any(t.policy_mask):
        assert t.spans[0].start == t.policy_mask.index(True)
    assert all(t.policy_mask[s.start] for s in t.spans)
