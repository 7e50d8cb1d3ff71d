"""How one version comes here: the state machine alone, under every order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from laminar.relay.chain import Candidate, candidates
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.layout import Layout, checksums, version_digest
from laminar.relay.pull import (
    PATIENCE_S,
    RETRY_S,
    STAGGER_S,
    Ask,
    Done,
    Effect,
    Fetch,
    Leave,
    Phase,
    Pull,
    Reserve,
)
from laminar.relay.transport.base import VersionHeader, VersionName

CHUNK = 64
LAYOUT = Layout.from_tensors({"w": ("uint8", (CHUNK * 5,))})


def header_of(version: int) -> VersionHeader:
    sums = checksums(memoryview(bytes([version]) * LAYOUT.total_bytes), CHUNK)
    return VersionHeader(VersionName(version, version_digest(LAYOUT, sums)), LAYOUT, CHUNK, tuple(sums))


HEADER = header_of(1)
NAME = HEADER.name


def pull_of(*relays: str, me: str = "me") -> tuple[Pull, list[Effect]]:
    pull = Pull((NAME,))
    return pull, pull.see(candidates([*relays, me], me), 0.0)


def receiving(*relays: str) -> Pull:
    """A pull that receives from the last of `relays`."""
    pull, _ = pull_of(*relays)
    pull.joined(relays[-1], 0.0)
    pull.answered(relays[-1], HEADER, 0.0)
    pull.reserved(0.0)
    assert pull.phase is Phase.RECEIVING
    return pull


def test_a_version_comes_from_the_relay_before() -> None:
    pull, effects = pull_of("master", "before")
    assert effects == [Ask("before", (NAME,), held_only=False)]
    assert pull.joined("before", 0.1) == []
    assert pull.answered("before", HEADER, 0.2) == [Reserve(HEADER)]
    assert pull.reserved(0.3) == [Fetch("before", ChunkSet(5, full=True))]
    assert pull.arrived("before", Piece(0, 4), 0.4) == []
    assert pull.arrived("before", Piece(4, 1), 0.5) == [Leave("before"), Done()]
    assert pull.phase is Phase.COMPLETE
    pull.validate()


def test_a_broken_link_is_repaired_by_asking_the_next_for_what_is_missing() -> None:
    pull = receiving("master", "before")
    pull.arrived("before", Piece(0, 2), 1.0)
    assert pull.failed("before", "closed the connection", 2.0) == [
        Leave("before"), Ask("master", (NAME,), held_only=False),
    ]  # fmt: skip
    pull.joined("master", 2.1)
    (fetch,) = pull.answered("master", HEADER, 2.2)
    assert isinstance(fetch, Fetch) and list(fetch.missing) == [2, 3, 4], "chunks that arrived are kept"
    pull.arrived("master", Piece(2, 1), 2.5)
    (repair,) = pull.repairs
    assert (repair.lost, repair.found, repair.seconds) == ("before", "master", 0.5)


def test_two_that_die_at_once_cost_two_tries_that_overlap() -> None:
    pull = receiving("master", "second", "third")
    assert Ask("second", (NAME,), held_only=False) in pull.failed("third", "reset", 1.0)
    assert pull.wake_at(1.0) == pytest.approx(1.0 + STAGGER_S), "a dead host does not answer at all"
    assert pull.tick(1.0 + STAGGER_S) == [Ask("master", (NAME,), held_only=False)]
    assert pull.joined("master", 1.3) == [Leave("second")]


def test_the_first_that_joins_is_kept_though_it_has_nothing_yet() -> None:
    """Else all relays would crowd at the master."""
    pull, _ = pull_of("master", "before")
    pull.joined("before", 0.1)
    assert pull.tick(1.0) == [] and pull.phase is Phase.ASKING
    assert pull.wake_at(1.0) == pytest.approx(0.1 + PATIENCE_S)
    assert pull.tick(0.1 + PATIENCE_S) == [Leave("before"), Ask("master", (NAME,), held_only=False)]


def test_who_refused_is_asked_again_later_and_those_behind_only_for_what_they_hold() -> None:
    pull = Pull((NAME,))
    pull.see(candidates(["master", "me", "after"], "me"), 0.0)
    assert pull.failed("master", "refused", 0.0)[-1] == Ask("after", (NAME,), held_only=True)
    assert pull.failed("after", "refused", 0.0) == [Leave("after")]
    assert pull.all_refused and pull.wake_at(0.0) == RETRY_S
    assert pull.tick(RETRY_S) == [Ask("master", (NAME,), held_only=False)]


def test_many_that_fail_at_once_keep_nobody_behind_them_from_being_asked() -> None:
    """Sixty names that do not resolve, each told a tenth of a second after it was asked; only the farthest lives."""
    dead = [f"dead-{i}" for i in range(60)]
    pull, effects = pull_of("alive", *dead)
    now, asked = 0.0, []
    while not pull.peer and now < 60.0:
        asked += [e.relay for e in effects if isinstance(e, Ask)]
        now = round(now + 0.1, 6)
        effects = pull.joined("alive", now) if asked[-1] == "alive" else pull.failed(asked[-1], "no such name", now)
    assert pull.peer == "alive" and asked == [*reversed(dead), "alive"]


def test_of_those_that_failed_as_often_the_nearest_is_asked_again_first() -> None:
    pull, _ = pull_of("master", "before")
    assert pull.failed("before", "refused", 0.0)[-1] == Ask("master", (NAME,), held_only=False)
    pull.failed("master", "refused", 0.0)
    assert pull.tick(RETRY_S) == [Ask("before", (NAME,), held_only=False)]


def test_a_new_epoch_forgets_old_refusals() -> None:
    pull, _ = pull_of("master")
    pull.failed("master", "refused", 0.0)
    effects = pull.see(candidates(["new", "master", "me"], "me"), 0.01)
    assert effects == [Ask("master", (NAME,), held_only=False)]


def test_a_peer_that_left_the_chain_is_left() -> None:
    pull = receiving("master", "before")
    effects = pull.see(candidates(["master", "me"], "me"), 2.0)
    assert effects == [Leave("before"), Ask("master", (NAME,), held_only=False)]


@pytest.mark.parametrize("sends", [False, True], ids=["sends nothing", "sends"])
def test_a_peer_that_moved_behind_us_is_left_though_it_sends(sends: bool) -> None:
    """It may have to wait for us next: each would then wait for the other."""
    if sends:
        pull = receiving("master", "before")
    else:
        pull, _ = pull_of("master", "before")
        pull.joined("before", 0.0)
    effects = pull.see(candidates(["master", "me", "before"], "me"), 1.0)
    assert effects == [Leave("before"), Ask("master", (NAME,), held_only=False)]


def test_one_that_was_being_tried_and_moved_behind_us_is_asked_anew() -> None:
    pull, _ = pull_of("before")
    effects = pull.see(candidates(["me", "before"], "me"), 0.1)
    assert effects == [Leave("before"), Ask("before", (NAME,), held_only=True)]


def test_a_peer_that_holds_the_version_complete_is_kept_wherever_it_stands() -> None:
    pull = Pull((NAME,))
    pull.see(candidates(["me", "after"], "me"), 0.0)
    pull.joined("after", 0.0)
    pull.answered("after", HEADER, 0.0)
    pull.reserved(0.0)
    assert pull.see(candidates(["me", "new", "after"], "me"), 1.0) == []
    assert pull.phase is Phase.RECEIVING


def test_a_peer_that_gives_nothing_any_more_is_left_and_each_time_later() -> None:
    """It lives, and says so. A piece that takes longer than patience comes through in the end."""
    pull = receiving("master", "before")
    pull.arrived("before", Piece(0, 1), 1.0)
    assert pull.tick(2.0) == [] and pull.wake_at(2.0) == 1.0 + PATIENCE_S
    effects = pull.tick(1.0 + PATIENCE_S)
    assert effects == [Leave("before"), Ask("master", (NAME,), held_only=False)]
    pull.joined("master", 7.0)
    pull.answered("master", HEADER, 7.0)
    assert pull.phase is Phase.RECEIVING and pull.wake_at(7.0) == 7.0 + 2 * PATIENCE_S


def test_without_an_arena_the_version_is_skipped() -> None:
    pull, _ = pull_of("master")
    pull.joined("master", 0.0)
    pull.answered("master", HEADER, 0.0)
    assert pull.reserved(0.0, problem="no arena is free for it") == [Leave("master"), Done("no arena is free for it")]
    assert pull.phase is Phase.ABANDONED


def test_a_peer_lost_while_the_arena_was_found_does_not_hide_the_arena() -> None:
    pull, _ = pull_of("master", "before")
    pull.joined("before", 0.0)
    pull.answered("before", HEADER, 0.0)
    pull.failed("before", "reset", 0.1)
    assert pull.reserved(0.2) == []
    pull.joined("master", 0.3)
    assert pull.answered("master", HEADER, 0.4) == [Fetch("master", ChunkSet(5, full=True))]


def test_another_version_than_asked_for_is_a_failure() -> None:
    pull, _ = pull_of("master")
    pull.joined("master", 0.0)
    assert pull.answered("master", header_of(2), 0.0) == [Leave("master")]
    assert pull.phase is Phase.SEEKING


def test_a_newer_version_will_do_until_one_is_answered_with() -> None:
    newer = header_of(2).name
    pull, _ = pull_of("master")
    pull.joined("master", 0.0)
    assert pull.accept((newer, NAME), 0.1) == [Leave("master"), Ask("master", (newer, NAME), held_only=False)]
    pull.joined("master", 0.2)
    pull.answered("master", HEADER, 0.3)
    assert pull.accept((newer,), 0.4) == [] and pull.acceptable == (NAME,)


class AnyOrder(RuleBasedStateMachine):
    """Random events at a relay with up to four others; effects are remembered, none is carried out twice."""

    relays = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pull = Pull((NAME,))
        self.open: set[str] = set()
        self.fetching: str = ""
        self.arrived: set[int] = set()
        self.awaiting_arena = False
        self.done = 0
        self.apply(self.pull.see(candidates(["a", "b", "me", "c"], "me"), 0.0))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(relay):
                    assert relay not in self.open, "nobody is asked twice at once"
                    self.open.add(relay)
                case Leave(relay):
                    self.open.discard(relay)
                    if self.fetching == relay:
                        self.fetching = ""
                case Fetch(relay, missing):
                    assert relay in self.open and not self.fetching
                    assert set(missing) == set(range(5)) - self.arrived
                    self.fetching = relay
                case Reserve():
                    assert not self.awaiting_arena
                    self.awaiting_arena = True
                case Done():
                    self.done += 1

    @rule(chain=st.permutations(["a", "b", "c", "d", "me"]), left=st.sets(st.sampled_from(relays)))
    def see(self, chain: list[str], left: set[str]) -> None:
        self.apply(self.pull.see(candidates([r for r in chain if r not in left], "me"), self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def joined(self, data: st.DataObject) -> None:
        relay = data.draw(st.sampled_from(sorted(self.open)))
        self.apply(self.pull.joined(relay, self.now))

    @precondition(lambda self: self.pull.peer)
    @rule()
    def answered(self) -> None:
        self.apply(self.pull.answered(self.pull.peer, HEADER, self.now))

    @precondition(lambda self: self.awaiting_arena)
    @rule()
    def reserved(self) -> None:
        self.awaiting_arena = False
        self.apply(self.pull.reserved(self.now))

    @precondition(lambda self: self.fetching and not self.pull.ended)
    @rule(data=st.data())
    def piece(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(set(range(5)) - self.arrived)))
        self.arrived.add(index)
        self.apply(self.pull.arrived(self.fetching, Piece(index, 1), self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        relay = data.draw(st.sampled_from(sorted(self.open)))
        self.apply(self.pull.failed(relay, "broke", self.now))

    @rule(seconds=st.sampled_from([0.01, 0.2, 6.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.pull.tick(self.now))

    @invariant()
    def sound(self) -> None:
        self.pull.validate()
        assert self.done == (1 if self.pull.ended else 0)
        assert not self.pull.ended or not self.open, "nothing stays open at the end"
        moment = self.pull.wake_at(self.now)
        assert moment is None or moment > self.now or self.pull.phase in (Phase.ASKING, Phase.RECEIVING)
        if not self.pull.ended and self.pull._candidates and not self.open:
            assert moment is not None, "a pull that asks nobody wakes up again"
        if self.pull.phase in (Phase.ASKING, Phase.RECEIVING):
            assert moment is not None, "nobody is waited for without end"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Together(RuleBasedStateMachine):
    """The pulls of some relays, of which each gets from another what that one has by then; only "a" has all from the
    start. Orders of the chain reach each when they like, and connections break. Nobody dies: so all end complete."""

    names = ("b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.chain = ["a", *self.names]
        self.pulls = {name: Pull((NAME,)) for name in self.names}
        self.asked: dict[tuple[str, str], bool] = {}
        self.fetching: dict[str, str] = {}
        for name in self.names:
            self.told(name)

    def apply(self, me: str, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(relay):
                    self.asked[me, relay] = effect.held_only
                case Leave(relay):
                    self.asked.pop((me, relay), None)
                    if self.fetching.get(me) == relay:
                        del self.fetching[me]
                case Fetch(relay):
                    self.fetching[me] = relay
                case Reserve():
                    self.apply(me, self.pulls[me].reserved(self.now))

    def has(self, relay: str) -> set[int]:
        missing = self.pulls[relay].missing if relay != "a" else ChunkSet(5)
        return set(range(5)) - set(missing) if missing is not None else set()

    def complete(self, relay: str) -> bool:
        return relay == "a" or self.pulls[relay].phase is Phase.COMPLETE

    @rule(order=st.permutations(["b", "c", "d"]))
    def plan(self, order: list[str]) -> None:
        self.chain = ["a", *order]

    @rule(me=st.sampled_from(names))
    def told(self, me: str) -> None:
        self.apply(me, self.pulls[me].see(candidates(self.chain, me), self.now))

    @rule(me=st.sampled_from(names))
    def breaks(self, me: str) -> None:
        if self.pulls[me].peer:
            self.apply(me, self.pulls[me].failed(self.pulls[me].peer, "reset", self.now))

    @rule(me=st.sampled_from(names))
    def step(self, me: str) -> None:
        """What comes next at `me`: a connection, an answer, as `Holdings.find` gives it, or a piece."""
        pull = self.pulls[me]
        if pull.phase is Phase.SEEKING:
            if tried := sorted(pull.tried, key=lambda relay: pull.tried[relay]):
                self.apply(me, pull.joined(tried[0], self.now))
        elif pull.phase is Phase.ASKING:
            peer = pull.peer
            if self.complete(peer) or (self.pulls[peer].has_arena and not self.asked[me, peer]):
                self.apply(me, pull.answered(peer, HEADER, self.now))
            elif self.asked[me, peer]:
                self.apply(me, pull.failed(peer, "has it not", self.now))
        elif me in self.fetching:
            peer = self.fetching[me]
            if there := sorted(self.has(peer) - self.has(me)):
                self.apply(me, pull.arrived(peer, Piece(there[0], 1), self.now))

    @rule(seconds=st.sampled_from([0.01, 0.3]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        for me, pull in self.pulls.items():
            self.apply(me, pull.tick(self.now))

    def teardown(self) -> None:
        for me in self.names:
            self.told(me)
        until = self.now + 4 * PATIENCE_S
        while self.now < until and not all(map(self.complete, self.names)):
            for me in self.names:
                self.step(me)
            self.time(0.1)
        stuck = {me: (p.phase, p.peer, p.missing) for me, p in self.pulls.items() if not self.complete(me)}
        assert not stuck, f"these wait for each other: {stuck}"


TestTogether = Together.TestCase
TestTogether.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_candidates_need_not_be_known() -> None:
    pull = Pull((NAME,))
    assert pull.see([], 0.0) == [] and pull.wake_at(0.0) is None
    assert pull.see([Candidate("late", held_only=False)], 1.0) == [Ask("late", (NAME,), held_only=False)]
