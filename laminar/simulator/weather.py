"""Applies a plan's faults to a cluster when their time comes, and ends those that last."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from laminar.buffer.coordination import Delete, Put, Transaction
from laminar.buffer.incoming import COPIED, first_path
from laminar.buffer.memory import Faults
from laminar.buffer.records import Rest
from laminar.simulator.cluster import Cluster, Slot
from laminar.simulator.faults import Fault, Kind
from laminar.simulator.process import CrashAt

SPARED = 0.5
"""Share of the files that a bit flip passes over, so that it hits first files and copies of both tables."""


class Weather:
    """`injected` counts faults by kind as they strike: one without a living target, or that waits for a call which its
    process never makes, is none."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.injected: Counter[Kind] = Counter()
        self._endings: list[Callable[[], object]] = []
        self._armed: dict[tuple[str, str], Kind] = {}
        """Tables whose next commit fails, and how."""
        self._to_flip: list[Fault] = []
        self._flipped: set[str] = set()
        """Segments of which one file was hit: the other one stays sound, and so nothing may be lost."""
        cluster.disk.written = self._spoil_written

    def counted(self) -> dict[str, int]:
        """How often each kind happened: a commit that was to fail and has not been made yet is none."""
        waiting = Counter(k for (name, hazard), k in self._armed.items() if getattr(self.cluster.tables[name], hazard))
        return {kind.value: n for kind, n in (self.injected - waiting).items()}

    async def blow(self) -> None:
        """Inject all faults of the plan, each at its time. Those at a call, or at what is written next, count then."""
        for fault in self.cluster.plan.faults:
            await asyncio.sleep(max(0.0, fault.at - self.cluster.loop.now))
            if await self.inject(fault) and fault.kind not in (Kind.CRASH_AT_CALL, Kind.STOP_AT_CALL):
                self.injected[fault.kind] += 1

    def calm(self) -> None:
        """End whatever lasts."""
        endings, self._endings = self._endings, []
        self._to_flip.clear()
        for ending in endings:
            ending()
        for slot in self.cluster.slots:
            if slot.process is not None:
                slot.process.crash = slot.process.pause = None

    async def inject(self, fault: Fault) -> bool:
        """Whether there was something to hit."""
        c = self.cluster
        match fault.kind:
            case Kind.ETCD_RESTART if not c.etcd.running:
                return False
            case Kind.COMPACTION if c.etcd.revision <= c.etcd.compacted:
                return False
            case Kind.ETCD_RESTART:
                c.say(f"fault: etcd is down for {fault.duration:.1f} s")
                c.etcd.stop()
                self._later(fault.duration, lambda: None if c.etcd.running else c.etcd.start())
                return True
            case Kind.COMPACTION:
                c.say(f"fault: etcd compacts up to {c.etcd.revision}")
                c.etcd.compact(c.etcd.revision)
                return True
            case Kind.POWER_CUT:
                self._power_cut(fault)
                return True
            case Kind.BIT_FLIP:
                return self._flip(fault)
            case Kind.REST:
                return self._rest(fault)
            case Kind.REPLY_OF_COMMIT | Kind.COMMIT_LATE | Kind.COMMIT_FAILS:
                return self._spoil_commit(fault)
            case Kind.LEASE:
                return self._lose_lease(fault)
        living = c.living(fault.target)
        if fault.kind in (Kind.REWARD_HANGS, Kind.REWARD_RAISES, Kind.ENGINE_BREAKS):
            living = [s for s in c.living("rollout") if s.engine is not None]
        if not living:
            return False
        slot = living[int(fault.choice * len(living))]
        c.say(f"fault: {fault.kind.value} of {slot.name} for {fault.duration:.1f} s")
        self._hit(fault, slot)
        return True

    def _spoil_commit(self, fault: Fault) -> bool:
        c = self.cluster
        name = sorted(c.tables)[int(fault.choice * len(c.tables))]
        hazard, value = {
            Kind.REPLY_OF_COMMIT: ("lose_reply", True),
            Kind.COMMIT_LATE: ("late_s", fault.duration),
            Kind.COMMIT_FAILS: ("fail_commit", True),
        }[fault.kind]
        if getattr(c.tables[name], hazard):
            return False
        c.say(f"fault: {fault.kind.value} of {name}")
        setattr(c.tables[name], hazard, value)
        self._armed[name, hazard] = fault.kind
        return True

    def _struck(self, kind: Kind) -> None:
        self.injected[kind] += 1

    def _hit(self, fault: Fault, slot: Slot) -> None:
        process, etcd, storage = slot.process, slot.etcd, slot.storage
        assert process is not None and etcd is not None and storage is not None
        match fault.kind:
            case Kind.KILL:
                process.kill()
            case Kind.CRASH_AT_CALL:
                process.crash = (process.calls + fault.calls, CrashAt.AFTER if fault.after else CrashAt.BEFORE)
                process.struck = self._struck
            case Kind.STOP_AT_CALL:
                moment = CrashAt.AFTER if fault.after else CrashAt.BEFORE
                process.pause = (process.calls + fault.calls, moment, fault.duration)
                process.struck = self._struck
                self._endings.append(process.cont)
            case Kind.STOP:
                process.stop()
                self._later(fault.duration, process.cont)
            case Kind.TERMINATE:
                slot.stop.set() if slot.kind in ("rollout", "relay") else process.kill()
            case Kind.PARTITION:
                etcd.faults.partition()
                self._later(fault.duration, etcd.faults.heal)
            case Kind.NETWORK:
                self._storm(etcd.faults, fault)
            case Kind.DISK_FULL:
                storage.full = True
                self._later(fault.duration, lambda: setattr(storage, "full", False))
            case Kind.DISK_ERRORS:
                storage.failing = 0.3
                self._later(fault.duration, lambda: setattr(storage, "failing", 0.0))
            case Kind.DISK_SLOW:
                storage.delay_s = (0.1, 1.0)
                self._later(fault.duration, lambda: setattr(storage, "delay_s", (0.0005, 0.005)))
            case Kind.REWARD_HANGS if slot.host is not None:
                host = slot.host
                host.hanging = 0.5
                self._later(fault.duration, lambda: setattr(host, "hanging", 0.0))
            case Kind.REWARD_RAISES if slot.host is not None:
                host = slot.host
                host.raising = 0.7
                self._later(fault.duration, lambda: setattr(host, "raising", 0.0))
            case Kind.ENGINE_BREAKS if slot.engine is not None:
                slot.engine.failing = True

    def _storm(self, faults: Faults, fault: Fault) -> None:
        share = random.Random(f"storm/{fault.choice}")
        faults.drop_reply, faults.late, faults.fail_before = (share.uniform(0.0, 0.2) for _ in range(3))
        faults.delay_s = (0.001, 0.3)

        def over() -> None:
            faults.drop_reply = faults.late = faults.fail_before = 0.0
            faults.delay_s = (0.0005, 0.01)

        self._later(fault.duration, over)

    def _lose_lease(self, fault: Fault) -> bool:
        """etcd forgets a lease, as after the restore of an old snapshot."""
        leases = self.cluster.etcd.leases()
        if not leases:
            return False
        lease = leases[int(fault.choice * len(leases))]
        self.cluster.say(f"fault: lease {lease:x} is lost")
        self.cluster.etcd.revoke(lease)
        return True

    def _rest(self, fault: Fault) -> bool:
        """A rollout is found slow, as `slowness.slow` would in a longer run; its rest ends sooner, too."""
        etcd, keys = self.cluster.etcd, self.cluster.keys
        living = [kv.key.rsplit("/", 1)[-1] for kv in etcd.page(keys.workers("rollout"), "", 100, 0).items]
        if not living:
            return False
        worker = living[int(fault.choice * len(living))]
        self.cluster.say(f"fault: {worker} is sent to rest for {fault.duration:.1f} s")
        rest = Put(keys.rest(worker), Rest(reason="a fault", until_us=0).dump())
        etcd.transact(Transaction((), (rest,)))
        self._later(fault.duration, lambda: etcd.transact(Transaction((), (Delete(rest.key),))))
        return True

    def _power_cut(self, fault: Fault) -> None:
        """The machine with everything on it: what was not synced is lost, or zeroed; etcd's data is kept."""
        c = self.cluster
        c.say("fault: power cut")
        for slot in c.slots:
            if slot.process is not None:
                slot.process.kill()
        c.disk.crash(keep_unsynced=fault.choice, zeroed=fault.after)
        for table in c.tables.values():
            table.forget_late()
        for table in c.unanswered:
            table.unreadable = fault.after
        c.unanswered.clear()
        c.etcd.restart()

    def _flip(self, fault: Fault) -> bool:
        """One bit in some partial log, or in one file of what the next step leaves: it lies there for a moment only."""
        c = self.cluster
        if fault.after:
            self._to_flip.append(fault)
            return False
        logs = c.disk.sizes("partials")
        if not logs:
            return False
        source = random.Random(f"flip/{fault.choice}")
        path = source.choice(sorted(logs))
        if not logs[path]:
            return False
        offset = source.randrange(logs[path])
        c.say(f"fault: bit flip in {path} at {offset}")
        c.disk.flip(path, offset, source.randrange(8))
        return True

    def _spoil_written(self, path: str) -> None:
        first = first_path(path)
        waits = first.startswith(tuple(f"incoming/{table}/" for table in COPIED))
        if not self._to_flip or not waits or first in self._flipped:
            return
        fault = self._to_flip[0]
        source = random.Random(f"flip/{fault.choice}/{path}")
        if source.random() < SPARED:
            return
        self._to_flip.pop(0)
        self._flipped.add(first)
        disk = self.cluster.disk
        offset = source.randrange(disk.sizes("incoming")[path])
        self.cluster.say(f"fault: bit flip in {path} at {offset}")
        disk.flip(path, offset, source.randrange(8))
        self._struck(fault.kind)

    def _later(self, seconds: float, ending: Callable[[], object]) -> None:
        """End something after a time, or when the weather calms down."""
        self._endings.append(ending)
        self.cluster.loop.call_later(seconds, ending)
