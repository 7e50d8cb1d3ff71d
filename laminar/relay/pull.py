"""How one version comes to this relay, whoever dies meanwhile: a state machine without I/O.

    SEEKING ──joined──▶ ASKING ──answered──▶ RESERVING ──reserved──▶ RECEIVING ──last chunk──▶ COMPLETE
       ▲                  │                      │                       │
       └──── the peer failed: its chunks are kept, the next candidate is asked ──┘        any ──▶ ABANDONED

| event     | tells                                              | effects                                     |
|-----------|----------------------------------------------------|---------------------------------------------|
| see       | whom to ask, best first (a new epoch of the chain) | Ask, or Leave of a peer that is no candidate|
| joined    | a peer proved the secret: it lives                 | Leave of the others that were tried         |
| answered  | a peer has, or begins to get, this version         | Reserve the first time, else Fetch          |
| reserved  | there is an arena                                  | Fetch                                       |
| arrived   | a checked piece lies in the arena                  | Done with the last one                      |
| failed    | a peer broke, fell silent, refused, sent nonsense  | Leave, Ask of the next                      |
| tick      | time                                               | Ask of one more or again; Leave of the idle |

The first candidate that *joins* is kept, though it may have no data yet: else all would crowd at the master. Tries
overlap (one more each `STAGGER_S`), so that dead hosts that nobody told of cost little.

Who may wait for another stands behind it in the chain: a peer that is itself still receiving is left once it stands
behind us. Where relays see different epochs meanwhile, and wait for each other in a ring, patience ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from laminar.relay.chain import Candidate
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.transport.base import VersionHeader, VersionName

STAGGER_S = 0.15
"""Seconds after which one more candidate is tried beside one that has not answered."""
PATIENCE_S = 5.0
"""Seconds that a living peer may have nothing to give before another is asked; doubled each time that a peer was left
for that within its pieces, since a piece may take longer on a slow link, and would else begin anew for ever."""
RETRY_S, LONGEST_RETRY_S = 0.25, 8.0
"""Seconds for which a peer that failed is not asked again: doubled with each failure."""


class Phase(Enum):
    SEEKING = "seeking"
    ASKING = "asking"
    RESERVING = "reserving"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    ABANDONED = "abandoned"


TRANSITIONS = {
    Phase.SEEKING: {Phase.ASKING, Phase.ABANDONED},
    Phase.ASKING: {Phase.SEEKING, Phase.RESERVING, Phase.ABANDONED},
    Phase.RESERVING: {Phase.RECEIVING, Phase.SEEKING, Phase.ABANDONED},
    Phase.RECEIVING: {Phase.SEEKING, Phase.COMPLETE, Phase.ABANDONED},
    Phase.COMPLETE: set(),
    Phase.ABANDONED: set(),
}


@dataclass(frozen=True)
class Ask:
    """Connect to `relay` and ask it for `acceptable`."""

    relay: str
    acceptable: tuple[VersionName, ...]
    held_only: bool


@dataclass(frozen=True)
class Leave:
    """Close what is open or being opened to `relay`; nothing may be written after that."""

    relay: str


@dataclass(frozen=True)
class Reserve:
    """Find an arena for `header` and check it; answer with `reserved`."""

    header: VersionHeader


@dataclass(frozen=True)
class Fetch:
    """Receive the missing chunks from `relay`."""

    relay: str
    missing: ChunkSet


@dataclass(frozen=True)
class Done:
    """All chunks are there; or the pull is given up, with the reason."""

    reason: str = ""


Effect = Ask | Leave | Reserve | Fetch | Done


@dataclass(frozen=True)
class Repair:
    """`seconds`: from knowing that `lost` failed to the first piece of another peer."""

    lost: str
    found: str
    reason: str
    seconds: float


@dataclass
class _Blame:
    failures: int = 0
    until: float = 0.0
    reason: str = ""


@dataclass
class Pull:
    """`acceptable`: the versions that would do, until one is answered with; then only that one."""

    acceptable: tuple[VersionName, ...]
    phase: Phase = Phase.SEEKING
    header: VersionHeader | None = None
    missing: ChunkSet | None = None
    peer: str = ""
    tried: dict[str, float] = field(default_factory=dict)
    repairs: list[Repair] = field(default_factory=list)
    reason: str = ""
    has_arena: bool = False
    _candidates: tuple[Candidate, ...] = ()
    _blame: dict[str, _Blame] = field(default_factory=dict)
    _held_only: dict[str, bool] = field(default_factory=dict)
    """How each relay was asked last. One that was asked for what it holds complete never waits for us."""
    _progress_at: float = 0.0
    _patience_s: float = PATIENCE_S
    _lost: tuple[str, str, float] | None = None

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.COMPLETE, Phase.ABANDONED)

    def validate(self) -> None:
        """Raises AssertionError if the parts of the state disagree."""
        with_peer = self.phase in (Phase.ASKING, Phase.RESERVING, Phase.RECEIVING)
        assert bool(self.peer) == with_peer, "a peer is kept in these phases only"
        assert not self.tried or self.phase is Phase.SEEKING, "others are tried only while nobody is kept"
        assert (self.header is None) == (self.missing is None)
        assert self.phase is not Phase.RECEIVING or self.has_arena
        assert self.phase is not Phase.RECEIVING or (self.missing is not None and len(self.missing) > 0)
        assert self.phase is not Phase.COMPLETE or (self.missing is not None and len(self.missing) == 0)
        assert self.header is None or self.acceptable == (self.header.name,)
        waiting = [relay for relay in {*self.tried, self.peer} if self._may_wait_for_us(relay)]
        assert not waiting, f"{', '.join(waiting)} may wait for us"

    # -- events -------------------------------------------------------------------------------------------------

    def see(self, candidates: Sequence[Candidate], now: float) -> list[Effect]:
        """Whom to ask, best first. A new list means that the chain changed: whoever refused may have it now."""
        if tuple(candidates) == self._candidates:
            return self._seek(now)
        self._candidates = tuple(candidates)
        self._blame.clear()
        effects: list[Effect] = []
        for relay in [r for r in self.tried if r not in self._names() or self._may_wait_for_us(r)]:
            del self.tried[relay]
            effects.append(Leave(relay))
        if self.peer and self.peer not in self._names():
            effects += self._lose("left the chain", now)
        elif self.peer and self._may_wait_for_us(self.peer):
            effects += self._lose("is no longer before us in the chain", now)
        return effects + self._seek(now)

    def accept(self, acceptable: tuple[VersionName, ...], now: float) -> list[Effect]:
        """Other versions would do as well, as they were published meanwhile. Ignored once one is being received."""
        if self.ended or self.header is not None or acceptable == self.acceptable:
            return []
        self.acceptable = acceptable
        effects: list[Effect] = [Leave(relay) for relay in (*self.tried, *([self.peer] if self.peer else []))]
        self.tried.clear()
        if self.peer:
            self.peer = ""
            self._move(Phase.SEEKING)
        return effects + self._seek(now)

    def joined(self, relay: str, now: float) -> list[Effect]:
        if relay not in self.tried:
            return [] if relay == self.peer else [Leave(relay)]
        others = [r for r in self.tried if r != relay]
        self.tried.clear()
        self.peer = relay
        self._progress_at = now
        self._move(Phase.ASKING)
        return [Leave(other) for other in others]

    def answered(self, relay: str, header: VersionHeader, now: float) -> list[Effect]:
        if relay != self.peer or self.phase is not Phase.ASKING:
            return []
        if header.name not in self.acceptable:
            return self.failed(relay, f"answered with version {header.name}, which nobody asked for", now)
        if self.header is not None:
            self._move(Phase.RESERVING)
            return self._fetch(now)
        self.header = header
        self.missing = ChunkSet(header.chunks, full=True)
        self.acceptable = (header.name,)
        self._move(Phase.RESERVING)
        return [Reserve(header)]

    def reserved(self, now: float, *, problem: str = "") -> list[Effect]:
        """An arena is there; with a `problem` there is none, and the version is skipped."""
        if self.ended:
            return []
        if problem:
            return self.abandon(problem)
        self.has_arena = True
        return self._fetch(now)

    def arrived(self, relay: str, piece: Piece, now: float) -> list[Effect]:
        """A checked piece lies in the arena. Late ones of a peer that was left count as well: they are checked."""
        if self.ended or self.missing is None:
            return []
        self.missing.discard(piece)
        if relay == self.peer:
            self._progress_at = now
        if self._lost is not None and relay == self.peer:
            lost, reason, since = self._lost
            self.repairs.append(Repair(lost, relay, reason, now - since))
            self._lost = None
        if len(self.missing) > 0:
            return []
        effects: list[Effect] = [Leave(r) for r in (*self.tried, *([self.peer] if self.peer else []))]
        self.tried.clear()
        self.peer = ""
        self.phase = Phase.COMPLETE
        return [*effects, Done()]

    def failed(self, relay: str, reason: str, now: float) -> list[Effect]:
        """`relay` broke, fell silent, refused, or sent what does not fit its header."""
        if self.ended:
            return []
        blame = self._blame.setdefault(relay, _Blame())
        blame.failures += 1
        blame.until = now + min(LONGEST_RETRY_S, RETRY_S * 2 ** (blame.failures - 1))
        blame.reason = reason
        self.tried.pop(relay, None)
        effects: list[Effect] = self._lose(reason, now) if relay == self.peer else [Leave(relay)]
        return effects + self._seek(now)

    def tick(self, now: float) -> list[Effect]:
        until = self._patient_until()
        if until is None or now < until:
            return self._seek(now)
        reason = f"had nothing to give for {until - self._progress_at:.0f} s"
        if self.phase is Phase.RECEIVING:
            self._patience_s *= 2
        return self.failed(self.peer, reason, now)

    def abandon(self, reason: str) -> list[Effect]:
        if self.ended:
            return []
        effects: list[Effect] = [Leave(r) for r in (*self.tried, *([self.peer] if self.peer else []))]
        self.tried.clear()
        self.peer = ""
        self.reason = reason
        self._move(Phase.ABANDONED)
        return [*effects, Done(reason)]

    # -- questions ----------------------------------------------------------------------------------------------

    def wake_at(self, now: float) -> float | None:
        """When `tick` is due; None if only another event can change anything."""
        if (until := self._patient_until()) is not None:
            return until
        if self.phase is not Phase.SEEKING or not self._candidates:
            return None
        moments = [blame.until for relay, blame in self._blame.items() if relay in self._names()]
        if self.tried and len(self.tried) < len(self._candidates):
            moments.append(max(self.tried.values()) + STAGGER_S)
        # A moment that has passed changed nothing: whoever could be tried by then is being tried.
        return min((moment for moment in moments if moment > now), default=None)

    @property
    def all_refused(self) -> bool:
        """Everybody was asked and failed: the version may be nowhere. It is asked for again, until abandoned."""
        return self.phase is Phase.SEEKING and bool(self._candidates) and self._names() <= self._blame.keys()

    def reasons(self) -> dict[str, str]:
        """Why candidates failed, for the logs."""
        return {relay: blame.reason for relay, blame in self._blame.items()}

    # -- inside -------------------------------------------------------------------------------------------------

    def _names(self) -> set[str]:
        return {c.relay for c in self._candidates}

    def _may_wait_for_us(self, relay: str) -> bool:
        """It stands behind us now, and was asked for what it may still be getting when it stood before us."""
        behind = any(c.relay == relay and c.held_only for c in self._candidates)
        return behind and not self._held_only[relay]

    def _patient_until(self) -> float | None:
        """When the peer is left, unless it gives something; None while nothing is expected of it."""
        if self.phase is Phase.ASKING:
            return self._progress_at + PATIENCE_S
        return self._progress_at + self._patience_s if self.phase is Phase.RECEIVING else None

    def _move(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"a pull cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def _lose(self, reason: str, now: float) -> list[Effect]:
        relay, was = self.peer, self.phase
        self.peer = ""
        if was is Phase.RECEIVING:
            self._lost = (relay, reason, now)
        self._move(Phase.SEEKING)
        return [Leave(relay)]

    def _fetch(self, now: float) -> list[Effect]:
        """Begin to receive, if both the peer and the arena are there."""
        if self.phase is not Phase.RESERVING or not self.has_arena or self.missing is None:
            return []
        self._move(Phase.RECEIVING)
        self._progress_at = now
        return [Fetch(self.peer, self.missing.copy())]

    def _seek(self, now: float) -> list[Effect]:
        """Try one more candidate, if it is time: of those that failed least, the best. Near ones that fail at once,
        such as names that do not resolve, would else be tried again and again before those behind them."""
        if self.phase is not Phase.SEEKING:
            return []
        if self.tried and now < max(self.tried.values()) + STAGGER_S:
            return []
        free = [c for c in self._candidates if c.relay not in self.tried and self._blamed(c.relay).until <= now]
        if not free:
            return []
        candidate = min(free, key=lambda c: self._blamed(c.relay).failures)
        self.tried[candidate.relay] = now
        self._held_only[candidate.relay] = candidate.held_only
        return [Ask(candidate.relay, self.acceptable, candidate.held_only)]

    def _blamed(self, relay: str) -> _Blame:
        return self._blame.get(relay, _Blame())
