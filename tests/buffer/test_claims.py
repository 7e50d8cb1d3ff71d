"""Transitions of a claim: terms only grow, sources move only when rows were copied, limits end in an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import KeyValue, absent
from laminar.buffer.keys import Keys
from laminar.buffer.records import Claim, Incoming
from laminar.errors import CoordinationError

KEYS = Keys("run")
GUARD = absent("guard")


def held(claim: Claim, group: int = 0, sample: int = 0, revision: int = 5) -> Held:
    return Held(claim, KeyValue(KEYS.claim(group, sample), claim.dump(), 3, revision))


def test_a_drawn_claim_is_its_owners_source() -> None:
    claim = claims.drawn("a", 7)
    assert (claim.owner, claim.term, claim.version, claim.source.worker, claim.source.term) == ("a", 1, 7, "a", 1)


def test_a_change_of_owner_raises_the_term_and_leaves_the_source() -> None:
    claim = claims.reassigned(claims.drawn("a", 0), "b", "death")
    assert (claim.owner, claim.term, claim.state, claim.deaths) == ("b", 2, "waiting", 1)
    assert claim.source.worker == "a"


def test_planned_moves_and_graceful_stops_count_no_death() -> None:
    assert claims.reassigned(claims.drawn("a", 0), "b", "move").deaths == 0
    assert claims.reassigned(claims.drawn("a", 0), "", "stop").deaths == 0


def test_a_claim_that_nobody_owned_is_no_death() -> None:
    left = claims.reassigned(claims.drawn("a", 0), "", "stop")
    assert claims.reassigned(left, "b", "death").deaths == 0


def test_new_tokens_forgive_deaths() -> None:
    claim = claims.adopted(claims.reassigned(claims.drawn("a", 0), "b", "death"), version=0, progress=10)
    assert (claim.deaths, claim.progress, claim.source.worker, claim.source.term) == (0, 10, "b", 2)
    again = claims.adopted(claims.reassigned(claim, "c", "death"), version=0, progress=10)
    assert again.deaths == 1


def test_exhausted_names_the_limit() -> None:
    dead = claims.drawn("a", 0).model_copy(update={"deaths": claims.MAX_DEATHS})
    assert "8 owners died" in claims.exhausted(dead)
    tried = claims.restarted(claims.drawn("a", 0), version=0, error="boom", counts=True)
    assert claims.exhausted(tried) == ""
    for _ in range(2):
        tried = claims.restarted(tried, version=0, error="boom", counts=True)
    assert "3 attempts failed" in claims.exhausted(tried) and "boom" in claims.exhausted(tried)


Step = st.sampled_from(["death", "move", "stop", "adopt", "restart"])


@given(st.lists(Step, max_size=40))
def test_any_history_keeps_the_invariants(history: list[str]) -> None:
    claim = claims.drawn("w0", 0)
    for n, step in enumerate(history):
        before = claim
        if step == "adopt":
            if claim.state != "waiting" or not claim.owner:
                continue
            claim = claims.adopted(claim, version=n, progress=n)
        elif step == "restart":
            if claim.state == "waiting":
                continue
            claim = claims.restarted(claim, version=n, error="e", counts=True)
        else:
            claim = claims.reassigned(claim, "" if step == "stop" else f"w{n + 1}", step)  # type: ignore[arg-type]
        claims.validate(before, claim)
        assert Claim.parse(claim.dump()) == claim


def test_validate_refuses_a_new_owner_without_a_new_term() -> None:
    before = claims.drawn("a", 0)
    with pytest.raises(CoordinationError, match="owner changed"):
        claims.validate(before, before.model_copy(update={"owner": "b"}))


@pytest.mark.parametrize(("samples", "groups"), [(8, 15), (120, 1), (100, 1), (1, 120)])
def test_a_draw_takes_whole_groups_that_fit_in_one_transaction(samples: int, groups: int) -> None:
    assert claims.draw_size(10_000, 10_000, samples) == groups
    transaction = claims.draw_transaction(
        KEYS, GUARD, None, groups=groups, samples_per_prompt=samples, owner="a", version=0, nonce="n"
    )
    assert len(transaction.success) == groups * samples + 1 <= 128


def test_a_draw_goes_on_from_the_cursor() -> None:
    """Case 35: stop at prompt 3, resume: prompt 3 comes next, not 0."""
    cursor = KeyValue(KEYS.cursor, '{"next": 3, "by": "x"}', 1, 9)
    transaction = claims.draw_transaction(
        KEYS, GUARD, cursor, groups=1, samples_per_prompt=2, owner="a", version=0, nonce="n"
    )
    assert [op.key for op in transaction.success] == [KEYS.cursor, KEYS.claim(3, 0), KEYS.claim(3, 1)]


def test_a_finish_of_too_many_claims_is_refused() -> None:
    many = [held(claims.drawn("a", 0), g) for g in range(101)]
    with pytest.raises(CoordinationError, match="split it"):
        claims.finish_transaction(KEYS, GUARD, many, "s", Incoming(table="t", path="p", rows=101, worker="a"))


def admitted(**changes: int) -> int:
    base: dict[str, int] = dict(
        cursor=0, consumed=0, to_retire=0, step=0, max_steps=100, groups_per_step=4, max_ahead=8, total_groups=1000,
        max_ready=1000,
    )  # fmt: skip
    return claims.admitted_groups(**{**base, **changes})


def test_admission_counts_from_what_is_consumed() -> None:
    """Case 34: resume at version 100 with a bound of 8 groups ahead: 8 are admitted, not 100 steps' worth."""
    assert admitted(step=100, max_steps=1000, consumed=400, cursor=400) == 8
    assert admitted(cursor=8) == 0


def test_admission_stops_where_the_run_can_consume_no_more() -> None:
    """Case 20: two steps in total, however fast the environment is."""
    assert admitted(max_steps=2, max_ahead=100) == 8
    assert admitted(max_steps=2, step=2, consumed=8, cursor=8) == 0
    assert admitted(total_groups=5) == 5


def test_staleness_is_bounded_by_admission() -> None:
    """While step 5 is trained (6 decided) by a rollout that holds version 5, one step's groups may be ahead."""
    assert admitted(step=6, consumed=24, cursor=24, version=5, max_staleness=1) == 4
    assert admitted(step=6, consumed=24, cursor=24, version=6, max_staleness=1) == 8
    assert admitted(step=6, consumed=24, cursor=24, version=3, max_staleness=1) == 0


def test_a_bound_of_zero_makes_rollouts_and_trainer_take_turns() -> None:
    assert admitted(step=6, consumed=24, cursor=24, version=6, max_staleness=0) == 4
    assert admitted(step=7, consumed=28, cursor=28, version=6, max_staleness=0) == 0


def test_nothing_is_drawn_while_a_batch_waits_for_the_trainer() -> None:
    """It would only get older. What is retired beside a batch is none."""
    assert admitted(max_ready=4, cursor=6, complete=3) == 2
    assert admitted(max_ready=4, cursor=6, complete=4) == 0
    assert admitted(max_ready=4, step=1, consumed=4, cursor=6, complete=5) == 6
    assert admitted(max_ready=4, cursor=6, complete=5, to_retire=2) == 4
    assert admitted(max_ready=4, step=2, consumed=8, cursor=8, complete=5) == 8, "told before they were consumed"


def test_a_group_is_complete_once_none_of_its_trajectories_is_unfinished() -> None:
    """Groups that were drawn after the cursor was read do not count."""
    unfinished = [held(claims.drawn("a", 0), g) for g in (1, 3, 3, 5, 6)]
    assert claims.complete_groups(5, unfinished) == 3
    assert claims.complete_groups(0, unfinished) == 0
    assert claims.complete_groups(4, []) == 4


def test_groups_that_will_only_be_retired_make_room_for_others() -> None:
    """Case 16: the filter rejects groups; later ones must still be admitted, or the trainer waits for ever."""
    assert admitted(max_steps=1, max_ahead=8, cursor=4) == 0
    assert admitted(max_steps=1, max_ahead=8, cursor=4, to_retire=4) == 4


def test_orphans_are_found_in_the_order_of_drawing() -> None:
    all_claims = {h.kv.key: h for h in (held(claims.drawn(o, 0), g) for g, o in ((2, "dead"), (0, "b"), (1, "dead")))}
    assert [h.id for h in claims.orphans(all_claims, {"b"})] == [(1, 0), (2, 0)]
