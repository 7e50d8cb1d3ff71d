"""Broadcasts under faults: real relays (chain, pull, follower, transfer, holdings) on simulated links, in virtual time.

    trainer ──▶ r0 (master) ──▶ r1 ──▶ … ──▶ r5      one of them, or two, fail at a chosen moment; then perhaps another
    manager: `chain.order` of those whose lease holds, `chain.master` when the master's does not

Who fails, when, how, by which transport and with how many faults is a `Case`; delays and what else is left open come
from its seed. Real: everything below the worker that a broadcast touches. Modelled: connections (`links`), the
manager's part by two of its real decisions, the trainer by publishing, and by offering the same bytes again to its
host's next relay. Whoever lives in the end must hold the version with the right bytes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from laminar.errors import LaminarError
from laminar.relay.chain import Place, master, order
from laminar.relay.follower import ChainView, Follower, Peer
from laminar.relay.hops import Tuning
from laminar.relay.layout import Layout
from laminar.relay.pull import Repair
from laminar.relay.transport.base import Transport, VersionName
from laminar.simulator.broadcast_cases import Case, How, Report, When, Who
from laminar.simulator.links import SimNetwork, SimTransport
from laminar.simulator.loop import SimulationLoop
from laminar.simulator.process import SimProcess
from laminar.simulator.relays import CHUNK_BYTES, SimRelayAccess, SimWeights
from laminar.simulator.run import bury, quiet

RELAYS, CHUNKS = 6, 40
LAYOUT = Layout.from_tensors({"w": ("uint8", (CHUNK_BYTES * CHUNKS - 1024,))})
RATE, DELAY_S = 400e3, (0.0001, 0.002)
"""So that a chunk takes 10 ms, and a broadcast without faults half a second."""
STALL_S, LEASE_S = 2.0, 4.0
AWAY_S = (0.5, 8.0)
"""How long what comes back is away: shorter and longer than a stall, and than a lease."""
PLAN_S, JOIN_RESET_S = (0.0, 0.2), (0.0, 0.4)
"""From a relay's joining to the plan that knows it; and until connections reset, where others joined beside."""
WATCH_S, LOOK_S = 0.001, 0.05
END_WITHIN_S = 60.0


def broadcast(case: Case) -> Report:
    """Equal cases give equal reports."""
    with quiet():  # which collects what the dead left; so nothing may hold the loop any more
        return _on_a_loop(case)


def _on_a_loop(case: Case) -> Report:
    loop = SimulationLoop(random.Random(f"loop/{case}"))
    try:
        return loop.run_until_complete(_run(case, loop))
    finally:
        bury(loop)


class Relay:
    """One life of the relay of a host: its process, and what lives in it."""

    def __init__(self, chain: Chain, host: str, life: int, rack: str) -> None:
        self.rack = rack
        self.name = f"{host}.{life}" if life else host
        self.host = host
        rate = chain.source.uniform(0.98, 1.02)
        self.process = SimProcess("relay", self.name, 100 + len(chain.relays), chain.loop, rate=rate)
        self.weights = SimWeights(self.process, "run", 2, chain.switchboard)
        self.follower: Follower | None = None
        self.links: dict[str, str] = {}
        self.gone_at: float | None = None
        """When its lease ends, once it cannot be renewed any more."""

    async def main(self, chain: Chain) -> int:
        async with self.weights as weights:
            transports: dict[str, Transport] = {
                name: SimTransport(
                    self.process, chain.network, name=name, stall_s=STALL_S, writes_itself=name == "verbs"
                )
                for name in chain.transports
            }
            links = {name: await t.listen(weights.holdings.find) for name, t in transports.items()}
            tuning = Tuning(grain=chain.grain, streams=chain.streams)
            self.follower = Follower(weights.holdings, transports, self.name, self.host, tuning=tuning)
            weights.holdings.fetch_elsewhere = self.follower.fetch
            self.links = links
            chain.changed.set()
            await self.follower.run()
        return 0

    @property
    def arrived(self) -> int:
        """Chunks of the version that are here."""
        if self.weights.holdings.versions():
            return CHUNKS
        transfer = self.follower.receiving if self.follower else None
        missing = transfer.pull.missing if transfer else None
        return 0 if missing is None else CHUNKS - len(missing)


class Chain:
    """The relays of all hosts, and the decisions of manager and trainer."""

    def __init__(self, case: Case, loop: SimulationLoop) -> None:
        self.case = case
        self.loop = loop
        self.source = random.Random(f"chain/{case}")
        self.network = SimNetwork(loop, random.Random(f"network/{case}"), delay_s=DELAY_S, rate=RATE)
        self.transports = ("verbs", "tcp") if case.transport == "verbs" else ("tcp",)
        self.streams = random.Random(f"streams/{case}").randint(1, 3)
        """Connections a hop."""
        self.grain = random.Random(f"grain/{case}").randint(1, 3)
        """Chunks of a piece."""
        self.switchboard: dict[str, SimWeights] = {}
        self.relays: list[Relay] = []
        self.changed = asyncio.Event()
        self.telling: set[asyncio.Task[None]] = set()
        self.plan: list[str] = []
        self.plan_at: float | None = None
        """When the newcomers are planned in."""
        self.order: list[str] = []
        self.epoch = 0
        self.master = ""
        self.home = "r0"
        """The trainer's host."""
        self.trainer = SimProcess("trainer", "trainer", 1, loop)
        self.content = random.Random(f"content/{case}").randbytes(LAYOUT.total_bytes)
        self.name: VersionName | None = None
        self.announced_at = 0.0
        self.sealing = False
        self.story: list[str] = []
        self.away: set[str] = set()
        """Relays that were stopped or cut off themselves, for a while."""

    def say(self, text: str) -> None:
        self.story.append(f"{self.loop.now:8.3f} {text}")

    def start(self, host: str, rack: str = "") -> Relay:
        relay = Relay(self, host, sum(r.host == host for r in self.relays), rack or host)
        self.relays.append(relay)
        self.say(f"{relay.name} starts")
        relay.process.start(relay.main(self))
        return relay

    def of(self, name: str) -> Relay:
        return next(relay for relay in self.relays if relay.name == name)

    @property
    def living(self) -> list[Relay]:
        """Whose process has not ended; stopped and cut off ones among them."""
        return [relay for relay in self.relays if not relay.process.dead]

    # -- the manager --------------------------------------------------------------------------------------------

    async def manage(self) -> None:
        """Tell everybody of each change: of who holds a lease, of the master, of the published version."""
        told: object = None
        while True:
            members = [r for r in self.relays if r.links and not (r.gone_at and self.loop.now >= r.gone_at)]
            self._plan(members)
            if self.name is not None and self.master not in self.order:
                holders = {r.name: 1 for r in members if not r.process.dead and r.weights.holdings.has(self.name)}
                self.master = master([n for n in self.order if n in holders], holders) or self.master
            state = (tuple(self.order), self.master, self.name)
            if state != told:
                self.epoch += 1
                told = state
                self.say(f"epoch {self.epoch}: {' -> '.join(self.order)}, master {self.master or 'none'}")
                peers = {r.name: Peer(r.host, r.links) for r in members}
                self._tell(ChainView(self.epoch, tuple(self.order), peers, self.master), members)
            self.changed.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def _plan(self, members: list[Relay]) -> None:
        """Relays see a newcomer at once, at the end as `workers.chain.chain_view` puts it; the plan comes a little
        later and may place it elsewhere."""
        places = {r.name: Place(r.host, r.rack) for r in members}
        if places.keys() <= set(self.plan):
            self.plan_at = None
        elif self.plan_at is None:
            self.plan_at = self.loop.now + self.source.uniform(*PLAN_S)
        if self.plan_at is None or self.loop.now >= self.plan_at:
            self.plan, self.plan_at = order(places, self.plan), None
        known = [name for name in self.plan if name in places]
        self.order = [*known, *sorted(places.keys() - set(known))]

    def _tell(self, view: ChainView, members: list[Relay]) -> None:
        """A watch's event: it reaches whoever is not cut off, and a stopped process once it goes on."""
        for relay in members:
            if not relay.process.dead:
                self.loop.outside(partial(self._spawn, self._reach(relay, view, self.name)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.telling.add(task)
        task.add_done_callback(self.telling.discard)

    async def _reach(self, relay: Relay, view: ChainView, name: VersionName | None) -> None:
        await asyncio.sleep(self.source.uniform(*DELAY_S))
        while relay.name in self.network.silent:  # noqa: ASYNC110  virtual time
            await asyncio.sleep(LOOK_S)
        if relay.process.dead:
            return

        async def see() -> None:
            assert relay.follower is not None
            if view.epoch >= relay.follower.view.epoch:
                relay.follower.see(view)
            if name is not None:
                relay.follower.published([name])

        try:
            await relay.process.ask(see)
        except ConnectionError:
            return  # it died meanwhile

    # -- the trainer --------------------------------------------------------------------------------------------

    async def train(self) -> int:
        """Publish; then offer the same bytes again to each relay of its host that comes without them."""
        while True:
            relay = next((r for r in self.living if r.host == self.home and r.links and not r.process.stopped), None)
            if relay is not None and not relay.weights.holdings.versions() and relay.name not in self.network.silent:
                try:
                    await self._offer(relay)
                except (LaminarError, OSError) as e:
                    self.say(f"the trainer: {e}")
            await asyncio.sleep(LOOK_S)

    async def _offer(self, relay: Relay) -> None:
        access = SimRelayAccess(self.trainer, relay.weights.endpoint.removeprefix("unix:"), self.switchboard)
        arena = await access.reserve(LAYOUT)
        if arena is None:
            return
        arena.buffer[:] = self.content
        self.sealing = True
        try:
            info = await access.seal(arena, 1)
        finally:
            self.sealing = False
        if self.name is None:
            self.announced_at = self.loop.now
        self.name = VersionName(1, info.digest)
        self.master = relay.name
        self.say(f"{relay.name} has the version from the trainer")
        self.changed.set()

    # -- faults -------------------------------------------------------------------------------------------------

    def victims(self) -> list[str]:
        middle = self.source.randrange(1, RELAYS - 2)
        pairs = [(0, 1), (middle, middle + 1), (middle, RELAYS - 1)]
        chosen = {
            Who.MASTER: (0,),
            Who.MIDDLE: (middle,),
            Who.LAST: (RELAYS - 1,),
            Who.TWO: self.source.choice(pairs),
        }[self.case.who]
        return [f"r{i}" for i in chosen]

    async def moment(self, victim: str) -> None:
        """Until the case's moment has come."""
        subject = self.of("r1" if victim == "r0" else victim)
        reached: Callable[[], bool] = {
            When.BEFORE_FIRST: lambda: self.name is not None,
            When.MIDWAY: lambda: subject.arrived >= CHUNKS // 2,
            When.BEFORE_LAST: lambda: subject.arrived >= CHUNKS - self.grain,
            When.AT_SEAL: lambda: self.sealing if victim == "r0" else subject.arrived == CHUNKS,
        }[self.case.when]
        until = self.loop.now + END_WITHIN_S
        while not reached() and self.loop.now < until:  # noqa: ASYNC110  virtual time
            await asyncio.sleep(WATCH_S)
        if self.case.when in (When.BEFORE_FIRST, When.AT_SEAL):
            await asyncio.sleep(self.source.uniform(0.0, 0.01))

    async def further(self, victims: list[str]) -> None:
        """While the others lack a part of it, which may be anything; or, if they lack nothing, soon after."""

        def missing() -> int:
            return sum(CHUNKS - r.arrived for r in self.living if r.name not in victims)

        left = self.source.randint(1, missing()) if missing() else -1
        until = self.loop.now + self.source.uniform(0.0, 1.5)
        while missing() > left and self.loop.now < until:  # noqa: ASYNC110  virtual time
            await asyncio.sleep(WATCH_S)

    def strike(self, relay: Relay, how: How) -> None:
        self.say(f"fault: {relay.name} {how.value}")
        away = self.source.uniform(*AWAY_S)
        match how:
            case How.KILLED:
                relay.process.kill()
                relay.gone_at = self.loop.now + LEASE_S
                self._later(self.source.uniform(0.3, 2.0), lambda: self.start(relay.host))
            case How.HOST_LOST:
                self.network.silence(relay.name)
                relay.process.kill()
                relay.gone_at = self.loop.now + LEASE_S
                if relay.host == self.home:
                    self._later(LEASE_S, self._move)
            case How.STOPPED:
                relay.process.stop()
                self._away(relay, away)
                self._later(away, relay.process.cont)
            case How.CUT_OFF:
                self.network.silence(relay.name)
                self._away(relay, away)
                self._later(away, lambda: self.network.mend(relay.name))
            case How.RESET:
                self.network.reset(relay.name)
            case How.JOINED:
                for host in ("n0", "n1"):
                    self.start(host, relay.rack)
                self._later(self.source.uniform(*JOIN_RESET_S), lambda: self.network.reset(relay.name))
            case How.DEVICES:
                self.network.fabric_broken = True
                self._later(away, lambda: setattr(self.network, "fabric_broken", False))

    def _away(self, relay: Relay, seconds: float) -> None:
        """Longer than its lease: it leaves the chain, and joins again. The same process may, as here nothing is claimed
        under its name."""
        self.away.add(relay.name)
        if seconds > LEASE_S:
            relay.gone_at = self.loop.now + LEASE_S
            self._later(seconds + 0.2, lambda: setattr(relay, "gone_at", None))

    def _move(self) -> None:
        """Another trainer takes over, beside the first relay that lives."""
        self.home = next(r.host for r in self.living if r.name not in self.network.silent)
        self.say(f"the trainer is on {self.home} now")

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        self.loop.outside(lambda: self.loop.call_later(seconds, call))

    # -- judging ------------------------------------------------------------------------------------------------

    @property
    def everybody_has_it(self) -> bool:
        name = self.name
        return name is not None and all(r.links and r.weights.holdings.has(name) for r in self.living)

    def problems(self) -> list[str]:
        found = [f"nobody took an exception: {fault}" for fault in self.loop.faults]
        for relay in self.living:
            holdings = relay.weights.holdings
            held = [v for v in holdings.versions() if v.name == self.name]
            if not held:
                found.append(f"{relay.name} does not hold the version: {relay.arrived} of {CHUNKS} chunks are there")
            elif bytes(held[0].arena.buffer(LAYOUT.total_bytes)) != self.content:
                found.append(f"{relay.name} holds other bytes")
            holdings.validate()
        ended = [r for r in self.relays if isinstance(r.process.result, BaseException)]
        return found + [f"{r.name} ended with {r.process.result!r}" for r in ended]

    def slow_repairs(self, victims: list[str]) -> list[str]:
        """One relay fails, not the master: whoever received from it has its next chunk within a second of knowing."""
        single = self.case.faults == 1 and self.case.who in (Who.MIDDLE, Who.LAST)
        slow = [(name, r) for name, r in self.repairs() if single and r.seconds >= 1.0 and name not in victims]
        return [f"{name}: a repair took {repair.seconds:.3f} s: {repair}" for name, repair in slow]

    def repairs(self) -> list[tuple[str, Repair]]:
        followers = [(relay.name, relay.follower) for relay in self.living if relay.follower]
        return [(name, repair) for name, follower in followers for hop in follower.hops for repair in hop.repairs]


async def _run(case: Case, loop: SimulationLoop) -> Report:
    chain = Chain(case, loop)
    manager = asyncio.create_task(chain.manage())
    for i in range(RELAYS):
        relay = chain.start(f"r{i}")
        while relay.name not in chain.order:  # noqa: ASYNC110  virtual time
            await asyncio.sleep(WATCH_S)
    chain.trainer.start(chain.train())
    victims = chain.victims()
    await chain.moment(victims[0])
    for victim in victims:
        chain.strike(chain.of(victim), case.how)
    if case.faults == 2:
        await chain.further(victims)
        others = [r for r in chain.living if r.name not in victims and r.links]
        chain.strike(chain.source.choice(others), chain.source.choice(list(How)))
    deadline = loop.now + END_WITHIN_S
    settled = 0.0
    # What was killed is started again, and what was away comes back: all of them are to hold it.
    while loop.now < deadline and settled < AWAY_S[1] + 1.0:
        await asyncio.sleep(LOOK_S)
        settled = settled + LOOK_S if chain.everybody_has_it else 0.0
    problems, repairs = [*chain.problems(), *chain.slow_repairs(victims)], chain.repairs()
    manager.cancel()
    for relay in chain.relays:
        relay.process.kill()
    chain.trainer.kill()
    took = loop.now - settled - chain.announced_at
    return Report(case, problems, repairs, took, chain.story, frozenset(chain.away))
