"""Carries out one pull: connections, arenas and checks around the state machine of `pull`.

    Ask ──▶ connect ─ joined ─ find ─ answered ──▶ Reserve ──▶ arena ─ reserved ──▶ Fetch
                                                                                      │
    Done ◀── arrived ◀── checked in a thread ◀── piece in the arena ◀── stream(s) ◀───┘
                            └─ as soon as a chunk is there, by the one that received it, if one did

All runs in one task's loop turns: an event is a plain call, its effects start or cancel tasks. Before anything is
fetched from another peer, whatever the one before could still write or check has ended: a chunk that others read is
never written again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chain import Candidate
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.hindrance import Hindrances
from laminar.relay.holdings import Holdings
from laminar.relay.hops import Hop, Measures, Tuning
from laminar.relay.pull import Ask, Done, Effect, Fetch, Leave, Phase, Pull, Reserve
from laminar.relay.receiving import Arriving, Checks, Source
from laminar.relay.transport.base import (
    IDLE_S,
    Link,
    LinkBroken,
    PeerRefused,
    PullRequest,
    Transport,
    VersionHeader,
    VersionName,
)
from laminar.relay.transport.selection import connect_best

log = logging.getLogger(__name__)

CONNECT_S = 1.0
"""Seconds to reach a peer by one transport and prove the secret; others are tried meanwhile."""
FRESH_S = IDLE_S / 2
"""Seconds after its answer in which a peer surely waits for what is fetched. To make an arena may take longer."""
CHECKING = 2
"""Pieces of a stream that may wait for their check while the next one arrives."""

Links = Mapping[str, Mapping[str, str]]
"""For each relay, its endpoints by name of the transport."""


@dataclass
class _Peer:
    """What is going on with one relay that is or was asked."""

    task: asyncio.Task[None]
    links: list[Link] = field(default_factory=list)
    held_only: bool = False
    answered_at: float = 0.0


class Transfer:
    """Brings one of `acceptable` into `holdings`. `see` it the chain, then `run` it."""

    def __init__(
        self,
        holdings: Holdings,
        transports: Mapping[str, Transport],
        acceptable: tuple[VersionName, ...],
        tuning: Tuning,
        hindrances: Hindrances,
    ) -> None:
        self.pull = Pull(acceptable)
        self._hindrances = hindrances
        self._holdings = holdings
        self._transports = transports
        self._tuning = tuning
        self._links: Links = {}
        self._relays = 0
        self._peers: dict[str, _Peer] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._arriving: Arriving | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reserving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._measures = Measures()
        self._base: Source | None = None

    # -- from outside -------------------------------------------------------------------------------------------

    def see(self, candidates: Sequence[Candidate], links: Links) -> None:
        """Whom to ask, best first, and where they are; call it again when the chain changes."""
        self._links = links
        self._relays = len(candidates) + 1
        self._do(self.pull.see(candidates, self._now()))

    def accept(self, acceptable: tuple[VersionName, ...]) -> None:
        self._do(self.pull.accept(acceptable, self._now()))

    def abandon(self, reason: str) -> None:
        self._do(self.pull.abandon(reason))

    async def run(self) -> Hop | None:
        """Until the version is held, or the pull was abandoned: None, and `pull.reason` says why."""
        problem, hop = "this relay stops", None
        if self._tuning.deltas and self._tuning.way.delta:
            self._base = self._holdings.read_newest()
        try:
            problem = await self._ended
        finally:
            self._do(self.pull.abandon(problem))
            if self._timer is not None:
                self._timer.cancel()
            try:
                await self._wind_down()
            finally:
                self._drop_base()
                if self._arriving is not None and self.pull.phase is Phase.COMPLETE:
                    hop = self._finish(self._arriving)
                elif self._arriving is not None:
                    self._holdings.abort(self._arriving, problem)
        return hop

    async def _wind_down(self) -> None:
        """Until nothing writes into the arena any more, also if cancelled meanwhile: it is used again after this."""
        tasks = {*self._leaving, *([self._reserving] if self._reserving else [])}
        cancelled: asyncio.CancelledError | None = None
        while tasks:
            try:
                _, tasks = await asyncio.wait(tasks)
            except asyncio.CancelledError as e:
                cancelled = e
                tasks = {task for task in tasks if not task.done()}
        if cancelled is not None:
            raise cancelled

    def _finish(self, arriving: Arriving) -> Hop:
        self._holdings.complete(arriving)
        header, measures = arriving.header, self._measures
        hop = measures.hop(header, self.pull.repairs, self._now())
        self._tuning.learn(hop, header.layout, differences=measures.differences > 0)
        log.info(
            "received version=%s from=%s bytes=%d sent=%d seconds=%.3f rate=%.0f repairs=%d",
            header.name, ",".join(hop.peers), hop.nbytes, hop.received, hop.seconds, hop.rate, len(hop.repairs),
        )  # fmt: skip
        return hop

    # -- effects ------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask():
                    self._start(effect.relay, partial(self._ask, effect))
                case Leave():
                    self._leave(effect.relay)
                case Reserve():
                    self._reserving = self._spawn(self._reserve(effect.header))
                case Fetch():
                    peer = self._peers[effect.relay]
                    fetch = partial(self._fetch, effect.relay, peer)
                    peer.task = self._spawn(self._guarded(effect.relay, fetch))
                case Done():
                    if not self._ended.done():
                        self._ended.set_result(effect.reason)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        moment = None if self.pull.ended else self.pull.wake_at(self._now())
        loop = asyncio.get_running_loop()
        self._timer = None if moment is None else loop.call_at(moment, self._tick)

    def _tick(self) -> None:
        peer, now = self.pull.peer, self._now()
        try:
            effects = self.pull.tick(now)
            if peer and self.pull.peer != peer:
                self._tell(peer, self.pull.reasons()[peer], receiving=False, reached=True)
            self._do(effects)
        except Exception as e:
            self._give_up(e)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """All tasks begin here: what nobody caught in one ends this pull, and the next one begins anew."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._give_up(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _give_up(self, error: BaseException) -> None:
        self._do(self.pull.abandon(self._unforeseen(error, "a pull was given up")))

    def _unforeseen(self, error: BaseException, what: str) -> str:
        """Tell of what has no words of its own, once for each kind; the reason to give for it."""
        reason = f"{what}: {error!r}"
        if self._hindrances.unforeseen(reason, self._now()):
            log.error("a transfer met what was not foreseen", exc_info=error)
            self._holdings.record_error(reason)
        return reason

    def _start(self, relay: str, work: Callable[[], Awaitable[None]]) -> None:
        self._peers[relay] = _Peer(self._spawn(self._guarded(relay, work)))

    def _leave(self, relay: str) -> None:
        peer = self._peers.pop(relay, None)
        if peer is None:
            return
        if peer.task is not asyncio.current_task():
            peer.task.cancel()
        task = self._spawn(self._close(peer))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _close(self, peer: _Peer) -> None:
        await asyncio.gather(peer.task, return_exceptions=True)
        for link in peer.links:
            try:
                await link.close()
            except Exception as e:  # the others are closed all the same
                self._unforeseen(e, "a connection was not closed as it should be")

    async def _guarded(self, relay: str, work: Callable[[], Awaitable[None]]) -> None:
        """What goes wrong with a peer is an event, whatever it is: this host may lack descriptors or threads."""
        try:
            await work()
        except Exception as e:
            errors = _leaves(e)
            for error in errors:
                if not isinstance(error, WeightsError):
                    self._unforeseen(error, f"relay {relay} was left")
            self._failed(relay, errors[0])

    def _failed(self, relay: str, error: BaseException) -> None:
        peer = self._peers.get(relay)
        if peer is None or peer.task is not asyncio.current_task():
            return
        reason = str(error) if isinstance(error, WeightsError) else repr(error)
        if not isinstance(error, (LinkBroken, PeerRefused)):
            # What came was wrong. Should a difference be at fault, the rest comes whole.
            self._drop_base()
        receiving = self.pull.peer == relay
        self._tell(relay, reason, receiving=receiving, reached=relay not in self.pull.tried)
        if receiving and self.pull.header is not None:
            self._holdings.record_error(f"version {self.pull.header.name}: {reason}")
        self._do(self.pull.failed(relay, reason, self._now()))

    def _tell(self, relay: str, reason: str, *, receiving: bool, reached: bool) -> None:
        """What came from it is lost: told each time. Else once for each kind of reason, since it is asked again."""
        first = self._hindrances.failed(relay, reason, self._now(), reached=reached)
        if receiving:
            log.warning("relay %s: %s", relay, reason)
        elif first and not reached:
            log.warning("relay %s cannot be reached, it is tried again: %s", relay, reason)
        else:
            log.log(logging.INFO if first else logging.DEBUG, "relay %s gives nothing: %s", relay, reason)

    # -- asking -------------------------------------------------------------------------------------------------

    async def _ask(self, ask: Ask) -> None:
        relay = ask.relay
        peer = self._peers[relay]
        peer.held_only = ask.held_only
        link = await self._connect(relay, peer)
        if (away := self._hindrances.reached(relay, self._now())) is not None:
            log.info("relay %s is reached again, after %.1f s", relay, away)
        self._do(self.pull.joined(relay, self._now()))
        if self.pull.peer != relay:
            return
        header = await self._find(link, ask.acceptable, held_only=ask.held_only)
        peer.answered_at = self._now()
        self._hindrances.gave(relay)
        self._do(self.pull.answered(relay, header, self._now()))

    async def _connect(self, relay: str, peer: _Peer) -> Link:
        link = await connect_best(self._transports, relay, self._links.get(relay, {}), deadline_s=CONNECT_S)
        peer.links.append(link)
        return link

    async def _find(self, link: Link, acceptable: tuple[VersionName, ...], *, held_only: bool) -> VersionHeader:
        """What the link sends next goes where this header says: no header is taken unchecked, whoever sent it."""
        known = self.pull.header
        layout = known.layout if known else self._tuning.layout
        base = self._base.header.name if self._base else None
        header = await link.find(PullRequest(acceptable, held_only, layout, base))
        if known is not None:
            await asyncio.to_thread(header.check_same, known)
            return header
        if header.chunk_bytes != self._holdings.chunk_bytes:
            raise PeerRefused(f"its chunks have {header.chunk_bytes} bytes, ours {self._holdings.chunk_bytes}")
        await asyncio.to_thread(header.check)
        return header

    async def _reserve(self, header: VersionHeader) -> None:
        problem = ""
        try:
            self._arriving = await self._holdings.begin(header)
            if self._arriving is None:
                problem = self._holdings.supply.problem or "no arena is free for it"
                self._holdings.skip(header.name)
        except WeightsError as e:
            problem = str(e)
        except Exception as e:
            problem = self._unforeseen(e, f"version {header.name} found no room")
        self._measures.began = self._measures.began or self._now()
        self._do(self.pull.reserved(self._now(), problem=problem))

    # -- receiving ----------------------------------------------------------------------------------------------

    async def _fetch(self, relay: str, peer: _Peer) -> None:
        while self._leaving:
            await asyncio.wait(self._leaving)
        missing, header = self.pull.missing, self.pull.header
        assert missing is not None and header is not None
        if len(missing) == 0:
            return
        grain = self._tuning.grain_for(header, relays=self._relays, link=peer.links[0])
        self._measures.peers.append(relay)
        self._measures.grain = grain
        streams = self._tuning.streams_for(len(missing) // grain)
        shares = [missing.every(streams, i, grain) for i in range(streams)] if streams > 1 else [missing.copy()]
        links = peer.links[:1] if self._now() - peer.answered_at < FRESH_S else []
        async with asyncio.TaskGroup() as group:
            for share in (share for share in shares if len(share) > 0):
                link = links.pop() if links else None
                group.create_task(self._stream(relay, peer, header, share, grain, link))

    async def _stream(
        self, relay: str, peer: _Peer, header: VersionHeader, share: ChunkSet, grain: int, link: Link | None
    ) -> None:
        """Receive `share` over `link`, which has answered, or a new one; pieces are checked while the next arrive."""
        arriving = self._arriving
        assert arriving is not None
        if link is None:
            link = await self._connect(relay, peer)
            await self._find(link, (header.name,), held_only=peer.held_only)
        room = asyncio.Semaphore(CHECKING)
        received, differences = link.received, link.differences
        checking = Checks(arriving)
        pieces = link.receive(arriving.arena, share, grain, self._base_of(header), checking.landed)
        try:
            async with asyncio.TaskGroup() as checks, aclosing(pieces):
                async for piece in pieces:
                    self._measures.landed_at = self._now()
                    if left := checking.left(piece):
                        await room.acquire()
                        check = partial(checking.check, left)
                        checks.create_task(self._check(relay, arriving, piece, check, room.release))
                    else:
                        self._arrived(relay, arriving, piece)
        finally:
            self._measures.received += link.received - received
            self._measures.differences += link.differences - differences

    def _base_of(self, header: VersionHeader) -> Arena | None:
        """Where the base lies, if differences to it make sense."""
        same = self._base is not None and self._base.header.layout.digest == header.layout.digest
        return self._base.arena if self._base is not None and same else None

    def _drop_base(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None

    async def _check(
        self,
        relay: str,
        arriving: Arriving,
        piece: Piece,
        left_over: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        # Not interrupted: while a thread reads these chunks nothing else may write them.
        check = asyncio.ensure_future(asyncio.to_thread(left_over))
        try:
            await asyncio.shield(check)
        except asyncio.CancelledError:
            await asyncio.gather(check, return_exceptions=True)
            error = None if check.cancelled() else check.exception()
            if error is not None and not isinstance(error, WeightsError):
                self._unforeseen(error, f"a piece of relay {relay} was not checked")
            elif error is None and not check.cancelled():
                self._arrived(relay, arriving, piece)
            raise
        finally:
            release()
        self._arrived(relay, arriving, piece)

    def _arrived(self, relay: str, arriving: Arriving, piece: Piece) -> None:
        self._measures.first_at = self._measures.first_at or self._now()
        self._hindrances.progress(arriving.header.name.version, self._now())
        if not self.pull.ended:
            arriving.add(piece)
        self._do(self.pull.arrived(relay, piece, self._now()))


def _leaves(error: BaseException) -> list[BaseException]:
    """What a group of errors holds, the first one first."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
