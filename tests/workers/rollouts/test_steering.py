"""What a rollout does next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.rollouts.steering import Action, Do, View, steer

FRESH = View(newest=3, loaded=3, running=0, room=64, admitted=4)


def test_it_loads_the_newest_version_first() -> None:
    assert steer(View(newest=0, loaded=-1, running=0, room=64, admitted=4)).do is Do.LOAD


def test_without_any_version_it_waits() -> None:
    """Case 33: it waits for weights, which the trainer offers before it waits for experience."""
    assert steer(View(newest=-1, loaded=-1, running=0, room=64, admitted=4)).do is Do.WAIT


def test_it_draws_while_it_holds_the_newest() -> None:
    assert steer(FRESH).do is Do.DRAW
    assert steer(replace(FRESH, running=10)).do is Do.DRAW


def test_a_newer_version_ends_drawing_and_is_loaded_when_empty() -> None:
    view = replace(FRESH, newest=4, running=5)
    assert steer(view).do is Do.WAIT and view.draining
    action = steer(replace(view, running=0))
    assert (action.do, action.version) == (Do.LOAD, 4)


def test_orphans_of_its_version_are_adopted_even_while_draining() -> None:
    assert steer(replace(FRESH, newest=4, running=5, inbox=(3,))).do is Do.ADOPT


def test_orphans_of_another_version_come_before_new_draws() -> None:
    view = replace(FRESH, inbox=(1,))
    action = steer(view)
    assert (action.do, action.version) == (Do.LOAD, 1)
    assert steer(replace(view, running=2)).do is Do.WAIT


def test_an_evaluation_runs_beside_generation_and_pins_the_version() -> None:
    view = replace(FRESH, evaluations=(3,))
    assert steer(view).do is Do.EVALUATE
    assert steer(replace(view, evaluating=True)).do is Do.DRAW
    assert steer(replace(view, newest=4, evaluating=True, admitted=0)).do is Do.WAIT


def test_a_stopping_rollout_begins_nothing() -> None:
    """Nor does it take over what has just come: it would leave with it."""
    for view in (FRESH, replace(FRESH, inbox=(3,)), replace(FRESH, evaluations=(3,)), replace(FRESH, newest=4)):
        assert steer(replace(view, stopping=True)).do is Do.WAIT


def test_a_resting_rollout_draws_nothing_and_finishes_what_comes() -> None:
    view = replace(FRESH, resting=True)
    assert steer(view).do is Do.WAIT and view.draining
    assert steer(replace(view, inbox=(3,))).do is Do.ADOPT
    assert steer(replace(view, newest=4)).do is Do.LOAD


def test_a_version_is_kept_until_there_is_room_for_what_waits_for_it() -> None:
    """All slots are held by trajectories that wait for their rewards, beside moved work of the loaded version."""
    full = View(newest=8, loaded=7, running=0, room=0, inbox=(7,))
    assert steer(full).do is Do.WAIT and not full.draining
    assert steer(replace(full, loaded=8)) == Action(Do.LOAD, 7)
    assert steer(replace(full, inbox=(6, 7))).do is Do.WAIT, "whatever came before it"
    assert steer(replace(full, evaluations=(8,))).do is Do.WAIT
    assert steer(replace(full, room=1)) == Action(Do.ADOPT, 7)
    assert steer(replace(full, inbox=())) == Action(Do.LOAD, 8)


INTERRUPT = replace(FRESH, interrupt=True)


def test_with_interrupt_a_newer_version_is_swapped_in_under_what_runs() -> None:
    action = steer(replace(INTERRUPT, newest=4, running=5))
    assert (action.do, action.version) == (Do.SWAP, 4)
    assert steer(replace(INTERRUPT, newest=4)).do is Do.LOAD
    assert steer(replace(INTERRUPT, loaded=-1)).do is Do.LOAD


def test_with_interrupt_work_of_any_version_goes_on_under_the_loaded_one() -> None:
    assert steer(replace(INTERRUPT, inbox=(1, 2))).do is Do.ADOPT
    assert steer(replace(INTERRUPT, inbox=(1,), room=0, admitted=0)).do is Do.WAIT


def test_with_interrupt_an_evaluation_pins_its_version_all_the_same() -> None:
    assert steer(replace(INTERRUPT, newest=4, running=5, evaluating=True, evaluations=(3,), admitted=0)).do is Do.WAIT
    older = replace(INTERRUPT, newest=4, loaded=4, evaluations=(2,))
    assert steer(replace(older, running=5)).do is Do.WAIT, "it drains"
    assert steer(older) == Action(Do.LOAD, 2)


views = st.builds(
    View,
    newest=st.integers(-1, 4),
    loaded=st.integers(-1, 4),
    running=st.integers(0, 3),
    room=st.integers(0, 3),
    inbox=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    evaluations=st.lists(st.integers(0, 4), max_size=1).map(tuple),
    evaluating=st.booleans(),
    admitted=st.integers(0, 3),
    stopping=st.booleans(),
    resting=st.booleans(),
    interrupt=st.booleans(),
)


@given(views)
def test_a_version_never_changes_under_running_work_and_draws_are_of_the_newest(view: View) -> None:
    action = steer(view)
    if action.do is Do.LOAD:
        assert not view.busy and action.version != view.loaded and action.version >= 0
    if action.do is Do.DRAW:
        assert view.loaded == view.newest and not view.stopping
    if action.do is Do.ADOPT:
        assert action.version == view.loaded and view.room > 0
    if action.do is Do.LOAD and not view.interrupt:
        assert view.loaded not in view.inbox


def applied(view: View, action: Action) -> View:
    """What a rollout sees next if nothing comes and nothing ends."""
    if action.do in (Do.LOAD, Do.SWAP):
        return replace(view, loaded=action.version)
    if action.do is Do.EVALUATE:
        return replace(view, evaluating=True)
    if action.do is Do.DRAW:
        drawn = min(view.room, view.admitted)
        return replace(view, running=view.running + drawn, room=view.room - drawn, admitted=0)
    taken = [v for v in view.inbox if view.interrupt or v == action.version][: view.room]
    inbox = list(view.inbox)
    for version in taken:
        inbox.remove(version)
    return replace(view, inbox=tuple(inbox), running=view.running + len(taken), room=view.room - len(taken))


def small_views() -> Iterator[View]:
    """All with three versions and a few of everything: chance seldom finds full slots beside an empty engine."""
    versions = (-1, 0, 1, 2)
    inboxes = [(), *((v,) for v in range(3)), *itertools.product(range(3), repeat=2)]
    evaluations = [(), *((v,) for v in range(3))]
    numbers = itertools.product(versions, versions, (0, 1), (0, 1, 2), inboxes, evaluations)
    for newest, loaded, running, room, inbox, asked in numbers:
        for resting, interrupt in itertools.product((False, True), repeat=2):
            yield View(newest, loaded, running, room, inbox, asked, admitted=1, resting=resting, interrupt=interrupt)


def test_what_nothing_disturbs_comes_to_rest_within_two_loads() -> None:
    for first in small_views():
        view, loads = first, 0
        for _ in range(8):
            if (action := steer(view)).do is Do.WAIT:
                break
            loads += action.do in (Do.LOAD, Do.SWAP)
            view = applied(view, action)
        assert steer(view).do is Do.WAIT and loads <= 2, first


@given(views)
def test_waiting_work_is_always_reached_once_the_engine_is_empty(view: View) -> None:
    idle = replace(view, running=0, evaluating=False, room=3, stopping=False)
    if idle.inbox and (idle.newest >= 0 or not idle.interrupt):
        assert steer(idle).do in (Do.ADOPT, Do.LOAD, Do.EVALUATE)
