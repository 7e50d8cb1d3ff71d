"""Keeps this relay at the newest published version, and fetches older ones when they are asked for.

    published (etcd) ──▶ wanted ──▶ transfer: what the relay before us has of it ──▶ held
    chain (etcd)     ──▶ candidates of each running transfer

While a version is under way newer ones wait: a link that is slower than the trainer would else never complete any.
Then the newest is taken and those between are skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from laminar.errors import WeightsError
from laminar.relay.chain import Candidate, candidates, led_by
from laminar.relay.hindrance import Hindrances
from laminar.relay.holdings import Holdings
from laminar.relay.hops import Hop, Tuning
from laminar.relay.pull import Phase
from laminar.relay.transfer import Links, Transfer
from laminar.relay.transport.base import Transport, VersionName
from laminar.relay.transport.names import split_endpoint

log = logging.getLogger(__name__)

MAX_WANTED = 16
"""Published versions remembered while none of them is here: the newest ones."""
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class Peer:
    """Another relay as etcd names it. `links`: its endpoints by name of the transport."""

    host: str
    links: Mapping[str, str]


@dataclass(frozen=True)
class ChainView:
    """The chain as this relay sees it. `master` is the relay that the newest version was published to."""

    epoch: int = 0
    order: tuple[str, ...] = ()
    peers: Mapping[str, Peer] = field(default_factory=dict)
    master: str = ""


class Follower:
    """`me`: this relay's id in the chain, on `host`. Give it what changes (`see`, `published`) and `run` it."""

    def __init__(
        self,
        holdings: Holdings,
        transports: Mapping[str, Transport],
        me: str,
        host: str,
        *,
        tuning: Tuning | None = None,
    ) -> None:
        self.me = me
        self.host = host
        self.tuning = tuning or Tuning()
        self.view = ChainView()
        self.hops: deque[Hop] = deque(maxlen=16)
        self.repairs = 0
        self.hindrances = Hindrances()
        self._holdings = holdings
        self._transports = transports
        self._wanted: list[VersionName] = []
        self._running: dict[Transfer, asyncio.Event] = {}
        """With what tells of its end."""
        self._following: Transfer | None = None
        self._changed = asyncio.Event()
        self._unreachable: set[str] = set()

    # -- what changes -------------------------------------------------------------------------------------------

    def see(self, view: ChainView) -> None:
        self.view = view
        self.hindrances.see(view.order)
        for transfer in self._running:
            transfer.see(*self._whom_to_ask())
        self._changed.set()

    def published(self, names: Sequence[VersionName]) -> None:
        """The newest version is one of `names`: of one number, since a trainer whose replay gave other bits offers them
        under another digest. The first is best. Ignored if a newer one is known."""
        version = names[0].version
        if self._wanted and version < self._wanted[0].version:
            return
        wanted = [*names, *(n for n in self._wanted if n.version != version)][:MAX_WANTED]
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    @property
    def receiving(self) -> Transfer | None:
        """The transfer of a published version that is under way."""
        return self._following

    def waits_for(self) -> str:
        """What the pull of a published version waits for, in words."""
        pull = self._following.pull if self._following else None
        if pull is None or pull.ended:
            return "it is asked for again soon"
        if pull.phase is Phase.SEEKING:
            known, _ = self._whom_to_ask()
            if not known:
                return "no relay is in the chain that it could be asked of"
            asked = f"those in the chain are asked in turn, {len(known)} in all"
            return "nobody gives it" if pull.all_refused else asked
        if pull.phase is Phase.RESERVING:
            return "an arena is made free for it"
        return f"{pull.peer} lives and has given nothing yet"

    # -- what is done -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            self._changed.clear()
            acceptable = self._acceptable()
            self._note(acceptable)
            if not acceptable:
                await self._changed.wait()
                continue
            hop = await self._follow(acceptable)
            if hop is None:
                await self._pause()

    async def fetch(self, name: VersionName, timeout_s: float) -> None:
        """Bring a version here that some relay holds, if it is not here. Raises WeightsError if none has it in time."""
        reason = ""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._holdings.has(name):
                    if (ended := self._bringing(name)) is not None:
                        # Another reader of this host asked for it, or it was published: one transfer serves all.
                        await ended.wait()
                        continue
                    transfer = Transfer(self._holdings, self._transports, (name,), self.tuning, self.hindrances)
                    try:
                        await self._run(transfer)
                    finally:
                        reasons = sorted(transfer.pull.reasons().items())
                        reason = transfer.pull.reason or "; ".join(f"{relay}: {why}" for relay, why in reasons)
                    if self._bringing(name) is None:
                        break
        except TimeoutError:
            pass
        if not self._holdings.has(name):
            raise WeightsError(
                f"version {name} could not be fetched from the {max(0, len(self.view.order) - 1)} other relays within "
                f"{timeout_s:g} s: {reason or 'nobody answered'}"
            )

    def _bringing(self, name: VersionName) -> asyncio.Event | None:
        """The end of the transfer that brings `name` and nothing else."""
        return next((ended for t, ended in self._running.items() if t.pull.acceptable == (name,)), None)

    async def _follow(self, acceptable: tuple[VersionName, ...]) -> Hop | None:
        transfer = Transfer(self._holdings, self._transports, acceptable, self.tuning, self.hindrances)
        self._following = transfer
        work = asyncio.create_task(self._run(transfer))
        try:
            while not work.done():
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait([work, changed], timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                self._reconsider(transfer)
            return work.result()
        finally:
            self._following = None
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _reconsider(self, transfer: Transfer) -> None:
        """What was published, or came by another way, while a transfer was under way."""
        pull = transfer.pull
        acceptable = self._acceptable()
        self._note(acceptable)
        if pull.ended:
            return
        if not acceptable:
            transfer.abandon("it is here already")
        elif pull.header is None:
            transfer.accept(acceptable)
        elif pull.header.name not in acceptable:
            transfer.abandon(f"version {pull.header.name} was published anew")
        elif pull.all_refused and acceptable != (pull.header.name,):
            transfer.abandon("nobody has the rest of it, and another version was published")

    async def _run(self, transfer: Transfer) -> Hop | None:
        self._running[transfer] = ended = asyncio.Event()
        try:
            transfer.see(*self._whom_to_ask())
            hop = await transfer.run()
        finally:
            del self._running[transfer]
            ended.set()
            self.repairs += len(transfer.pull.repairs)
        if hop is not None:
            self.hops.append(hop)
        elif transfer is self._following:
            self.hindrances.gave_up(transfer.pull.reason, self._now())
        return hop

    def _note(self, acceptable: tuple[VersionName, ...]) -> None:
        newest, wanted = self._holdings.newest, acceptable[0].version if acceptable else None
        self.hindrances.wants(wanted, self._now(), newest_here=newest.version if newest else -1)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _pause(self) -> None:
        """A pull that was given up is begun again when something changes, or after a while."""
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self._changed.wait()
        except TimeoutError:
            return

    def _acceptable(self) -> tuple[VersionName, ...]:
        """The published versions that are newer than what is here, best first. One that was skipped for want of an
        arena is tried again only while it is the newest."""
        newest = self._holdings.newest
        newer = [n for n in self._wanted if newest is None or n.version > newest.version]
        return tuple(n for n in newer if n.version == newer[0].version or n not in self._holdings.skipped)

    def _whom_to_ask(self) -> tuple[Sequence[Candidate], Links]:
        view = self.view
        chain = led_by(view.order, view.master)
        links = {relay: peer.links for relay, peer in view.peers.items() if self._reachable(relay, peer)}
        return [c for c in candidates(chain, self.me) if c.relay in links], links

    def _reachable(self, relay: str, peer: Peer) -> bool:
        """Whether its addresses mean it from here: a loopback address is another machine's own."""
        if peer.host == self.host or not all(_is_loopback(e) for e in peer.links.values()):
            return bool(peer.links)
        if relay not in self._unreachable:
            self._unreachable.add(relay)
            self._holdings.record_error(
                f"relay {relay} on {peer.host} listens for its own host only ({', '.join(peer.links.values())}): no "
                "weights come from there; set relay.bind to an address that other hosts reach"
            )
        return False


def _is_loopback(endpoint: str) -> bool:
    host, _ = split_endpoint(endpoint)
    return host.startswith("127.") or host in ("localhost", "::1")
