"""The relay worker's part in the chain: it follows what etcd says of chain and weights, and reports what it holds.

    chain, workers/relay ──▶ ChainView ──┐
    weights, offers ───────▶ published ──┴─▶ Follower ──▶ holdings ──▶ load/relay/<id>
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Iterable

from laminar.buffer.coordination import Coordination, KeyValue, Put, Transaction, absent
from laminar.buffer.keys import Keys
from laminar.buffer.records import ChainRecord, RelayHop, RelayLoad, RelayStall, RelayTrouble, WeightsHead, WorkerRecord
from laminar.clock import Clock
from laminar.config import RelayConfig
from laminar.errors import ConfigError, CoordinationUnavailable, StoreError
from laminar.relay.follower import ChainView, Follower, Peer
from laminar.relay.holdings import Holdings
from laminar.relay.pull import Repair
from laminar.relay.transport.base import Transport, VersionName
from laminar.relay.transport.selection import open_transports
from laminar.relay.transport.tcp import listen_at
from laminar.workers.committer_lives import CommitterLives
from laminar.workers.context import Member, Run
from laminar.workers.machine import Machine
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.tasks import until_first

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""Least seconds between two reports."""
REFRESH_S = 5.0
"""Most seconds between two reports."""
OFFER_S = 2.0
"""Seconds that a version held under a digest that nobody published has: it is sealed before it is offered."""
MAX_HEARD = 64
"""Versions of which it is known when they were heard of: the newest ones."""
SHOWN_ERRORS, SHOWN_TROUBLES, SHOWN_REPAIRS, SHOWN_CHARACTERS = 3, 4, 4, 300


async def run_secret(coordination: Coordination, keys: Keys, machine: Machine) -> bytes:
    """The key by which relays of this run know each other: made once, kept in etcd, which only workers can read. It
    is in no manifest, log or report."""
    kv = await coordination.get(keys.secret)
    if kv is None:
        put = Put(keys.secret, machine.token(32))
        await coordination.transact(Transaction((absent(keys.secret),), (put,)))
        kv = await coordination.get(keys.secret)
    if kv is None or len(kv.value) < 32:
        raise StoreError(f"etcd has no usable secret of the run at {keys.secret}: delete that key, start relays anew")
    return kv.value.encode("ascii")


def listening(config: RelayConfig, host: str) -> tuple[str, str]:
    """(address to bind, host name to advertise, empty for the bound address). Raises ConfigError."""
    bind = os.environ.get("LAMINAR_RELAY_BIND") or config.bind
    advertise = os.environ.get("LAMINAR_RELAY_ADVERTISE") or config.advertise
    if "/" in bind:
        bind = address_within(bind)
    if bind in ("0.0.0.0", "::") and not advertise:
        advertise = host
    return bind, advertise


async def check_listening(config: RelayConfig) -> None:
    """Raises ConfigError if a relay that began on this host now could not listen."""
    bind, _ = listening(config, socket.gethostname())
    (await listen_at(bind, config.port)).close()


def address_within(network: str) -> str:
    """This host's address by which it reaches `network`. Raises ConfigError if it has none there."""
    try:
        net = ipaddress.ip_network(network, strict=False)
    except ValueError as e:
        raise ConfigError(f"relay.bind = {network!r} is neither an address nor a network: {e}") from e
    family = socket.AF_INET if net.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: the kernel only picks the address it would send from.
            probe.connect((str(net[1] if net.num_addresses > 2 else net[0]), 9))
            found = str(probe.getsockname()[0])
        except OSError as e:
            raise ConfigError(f"this host does not reach {network} (relay.bind): {e.strerror}") from e
    if ipaddress.ip_address(found) not in net:
        raise ConfigError(f"this host has no address in {network} (relay.bind); it would reach it from {found}")
    return found


def chain_view(chain: KeyValue | None, relays: Iterable[KeyValue], head: WeightsHead | None) -> ChainView:
    """The chain as planned. Relays that the plan does not know yet follow by their names."""
    records = {record.id: record for record in (WorkerRecord.parse(kv.value) for kv in relays)}
    plan = ChainRecord.parse(chain.value) if chain else ChainRecord(epoch=0, order=[])
    known = [relay for relay in plan.order if relay in records]
    order = (*known, *sorted(records.keys() - set(known)))
    peers = {relay: Peer(record.host, record.links) for relay, record in records.items()}
    return ChainView(plan.epoch, order, peers, head.master if head else "")


class ChainMember:
    """This relay in the chain, under one lease."""

    def __init__(
        self, run: Run, member: Member, holdings: Holdings, follower: Follower, committers: CommitterLives
    ) -> None:
        """`committers`: those beside this relay, of which it reports."""
        self.run_info = run
        self.member = member
        self.holdings = holdings
        self.follower = follower
        self.committers = committers
        self.clock: Clock = run.clock
        self.bell = Bell()
        keys, coordination = run.keys, run.coordination
        self.chain = Mirror(coordination, keys.chain, exact=True, bell=self.bell)
        self.relays = Mirror(coordination, keys.workers("relay"), bell=self.bell)
        self.weights = Mirror(coordination, keys.weights, exact=True, bell=self.bell)
        self.offers = Mirror(coordination, keys.offers, bell=self.bell)
        self.repairs = 0
        self._heard: dict[int, float] = {}
        self._unknown: tuple[VersionName, float] | None = None
        """What is held of the newest version under a digest that is not known, and since when."""
        self._reported: list[RelayHop] = []

    async def run(self) -> None:
        """Until cancelled."""
        async with self.chain, self.relays, self.weights, self.offers:
            await until_first(self.follower.run(), self._watch(), self._report())

    async def _watch(self) -> None:
        while True:
            for mirror in (self.chain, self.relays, self.weights, self.offers):
                mirror.check()
            head = WeightsHead.parse(self.weights.only.value) if self.weights.only else None
            self.follower.see(chain_view(self.chain.only, self.relays.items.values(), head))
            if head is not None:
                self._hear(head.version)
                self._published(head)
            await self.bell.wait(REFRESH_S if self._unknown is None else OFFER_S)

    def _hear(self, version: int) -> None:
        self._heard.setdefault(version, self.clock.monotonic())
        for old in sorted(self._heard)[:-MAX_HEARD]:
            del self._heard[old]

    def _published(self, head: WeightsHead) -> None:
        """The newest version, under the digest of its publication and under those it was offered with since."""
        prefix = self.run_info.keys.offers_of(head.version)
        offered = [key.rsplit("/", 1)[-1] for key in self.offers.items if key.startswith(prefix)]
        digests = [head.digest, *(digest for digest in offered if digest != head.digest)]
        held = next((h for h in self.holdings.versions() if h.info.version == head.version), None)
        now = self.clock.monotonic()
        if held is None or held.info.digest in digests:
            self._unknown = None
        elif self._unknown is None or self._unknown[0] != held.name:
            self._unknown = held.name, now
        elif now - self._unknown[1] >= OFFER_S:
            # Sealed here by a trainer that died before it announced it; its successor published other bits.
            self.holdings.discard(head.version)
            self._unknown = None
        self.follower.published([VersionName(head.version, digest) for digest in digests])

    # -- reporting ----------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        key = self.run_info.keys.load("relay", self.member.id)
        last, at = "", 0.0
        while True:
            value = self.load().dump()
            if value != last or self.clock.monotonic() - at >= REFRESH_S:
                try:
                    await self.run_info.coordination.put(key, value, lease=self.member.session.lease)
                    last, at = value, self.clock.monotonic()
                except CoordinationUnavailable as e:
                    log.warning("a report was not written, the next one will be: %s", e)
            await self.clock.sleep(REPORT_S)

    def load(self) -> RelayLoad:
        follower, holdings = self.follower, self.holdings
        transfer = follower.receiving
        arriving = ""
        if transfer is not None and (header := transfer.pull.header) is not None and transfer.pull.missing is not None:
            arriving = f"{header.name}: {header.chunks - len(transfer.pull.missing)} of {header.chunks} chunks"
            arriving += f" from {transfer.pull.peer}" if transfer.pull.peer else f", {transfer.pull.phase.value}"
        return RelayLoad(
            epoch=follower.view.epoch,
            held={h.info.version: h.info.digest for h in holdings.versions()},
            arriving=arriving,
            hop=self._last_hop(),
            repairs=follower.repairs,
            refusals=holdings.refusals,
            last_refusal=holdings.last_refusal[:SHOWN_CHARACTERS],
            errors=[error[:SHOWN_CHARACTERS] for error in list(holdings.errors)[-SHOWN_ERRORS:]],
            stall=self._stall(),
            troubles=[
                RelayTrouble(
                    relay=trouble.relay,
                    reason=trouble.reason[:SHOWN_CHARACTERS],
                    since=self._utc(trouble.since),
                    at=self._utc(trouble.at),
                )
                for trouble in follower.hindrances.troubles()[:SHOWN_TROUBLES]
            ],
            committer=self.committers.trouble,
        )

    def _stall(self) -> RelayStall | None:
        stall = self.follower.hindrances.stall(self.clock.monotonic())
        if stall is None:
            return None
        return RelayStall(
            version=stall.version,
            since=self._utc(stall.since),
            waits=self.follower.waits_for(),
            reason=stall.reason[:SHOWN_CHARACTERS],
            at=self._utc(stall.at) if stall.reason else 0,
        )

    def _utc(self, moment: float) -> int:
        """A moment of the monotonic clock in UTC microseconds; in tenths of a second, or each report would differ."""
        return round(self.clock.now_us() / 1e5 + (moment - self.clock.monotonic()) * 10) * 100_000

    def _last_hop(self) -> RelayHop | None:
        if not self.follower.hops:
            return None
        hop = self.follower.hops[-1]
        version = hop.name.version
        heard = self._heard.get(version)
        self._heard = {v: at for v, at in self._heard.items() if v >= version}
        return RelayHop(
            version=version,
            peers=list(hop.peers[-SHOWN_REPAIRS - 1 :]),
            bytes=hop.nbytes,
            received=hop.received,
            seconds=round(hop.seconds, 6),
            lag_s=round(hop.ended_at - heard, 6) if heard is not None else round(hop.seconds, 6),
            piece_bytes=hop.piece_bytes,
            repairs=[_told(repair) for repair in hop.repairs[-SHOWN_REPAIRS:]],
            repaired=len(hop.repairs),
        )


def _told(repair: Repair) -> str:
    text = f"{repair.lost} -> {repair.found} in {repair.seconds:.3f} s ({repair.reason})"
    return text[:SHOWN_CHARACTERS]


async def relay_transports(run: Run, relay: str, holdings: Holdings) -> list[Transport]:
    """What real relays reach each other by, best first. Raises ConfigError for an address that is not this host's."""
    config = run.config.relay
    bind, advertise = listening(config, run.machine.host)
    secret = await run_secret(run.coordination, run.keys, run.machine)
    return await asyncio.to_thread(
        open_transports,
        config.transport,
        secret=secret,
        run=run.keys.run,
        relay=relay,
        bind=bind,
        port=config.port,
        advertise=advertise,
        stall_s=config.stall_timeout,
        delta_share=config.delta_share,
        on_refusal=holdings.record_refusal,
        on_error=holdings.record_error,
    )
