"""What every worker holds: its identity, its lease, the store, and the run's config."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from laminar.buffer.coordination import Coordination, KeyValue
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.manifest import RunFile, read_run
from laminar.buffer.records import RunManifest, WorkerRecord
from laminar.buffer.session import Membership, Session
from laminar.buffer.storage import Storage, open_storage
from laminar.clock import Clock, SystemClock
from laminar.config import Config, config_from
from laminar.errors import ConfigChanged, LeaseLost, StoreError
from laminar.workers.machine import Machine, this_machine
from laminar.workers.mirror import Mirror
from laminar.workers.patience import patiently

log = logging.getLogger(__name__)

RECOVERY_WAIT_S = 60.0
LOOK_AGAIN_S = 3600.0
JOIN_WAIT_S = 60.0
"""How long a worker that starts waits for the store. Longer than what counts as a quick crash: an outage of the store
is not the worker's fault."""


def boot_id(kind: str, machine: Machine) -> str:
    """`kind-host-pid-random`: new at each start, so that a restarted worker is a new worker."""
    host = "".join(c if c.isalnum() else "_" for c in machine.host)[:24]
    return f"{kind}-{host}-{machine.pid}-{machine.token(3)}"


@dataclass(frozen=True)
class Run:
    """A run that this process has joined: its manifest in etcd and its file in the store agree."""

    coordination: Coordination
    keys: Keys
    storage: Storage
    file: RunFile
    config: Config
    clock: Clock
    machine: Machine = field(default_factory=this_machine)
    config_digest: str = ""
    """What the manifest said, just before `config` was read."""


@dataclass(frozen=True)
class Member:
    """One life of a worker in a run, under one lease."""

    run: Run
    id: str
    session: Session
    membership: Membership
    ledger: Ledger

    async def until_lost(self) -> None:
        """Raise LeaseLost when this worker's lease has ended."""
        await self.session.lost.wait()
        raise LeaseLost(f"{self.id} lost its lease: {self.session.reason}; what it held goes to others")

    async def until_changed(self) -> None:
        """Raise ConfigChanged when a resume has given the run another config than this worker has read."""
        run = self.run
        async with Mirror(run.coordination, run.keys.manifest, exact=True) as manifest:

            def changed() -> bool:
                kv = manifest.only
                return kv is not None and RunManifest.parse(kv.value).config not in ("", run.config_digest)

            while not await manifest.wait_for(changed, LOOK_AGAIN_S):
                log.debug("%s works under the run's config as it was", self.id)
        raise ConfigChanged(f"run {run.keys.run!r} was resumed with another config: {self.id} begins anew under that")


async def join_run(access: EtcdAccess, name: str, clock: Clock | None = None) -> Run:
    """Connect to etcd, read the manifest, open the store and check that it is the one that the others see."""
    coordination = access.connect()
    try:
        run = await open_run(coordination, name, clock or SystemClock())
        if not run.storage.local:
            # With this host's keys: what it may not do shows now, and not at the first flush.
            await patiently(run.clock, "trying the store", run.storage.probe, wait_s=JOIN_WAIT_S)
        return run
    except BaseException:
        await coordination.close()
        raise


async def open_run(
    coordination: Coordination, name: str, clock: Clock, storage: Storage | None = None, machine: Machine | None = None
) -> Run:
    kv = await coordination.get(Keys(name).manifest)
    if kv is None:
        raise StoreError(
            f"etcd knows no run {name!r} (no {Keys(name).manifest}); start it: `laminar run CONFIG`, or, if its etcd "
            "was lost, rebuild that from the store: `laminar recover STORE`"
        )
    manifest = RunManifest.parse(kv.value)
    storage = storage or open_storage(manifest.store, manifest.storage)
    file = await patiently(clock, "reading run.json", partial(read_run, storage), wait_s=JOIN_WAIT_S)
    if file.store_id != manifest.store_id:
        raise StoreError(
            f"the store at {manifest.store} has id {file.store_id}, the run's is {manifest.store_id}: this worker does "
            "not see the same storage as the others; check its mounts"
        )
    if file.generation > manifest.generation:
        raise StoreError(
            f"etcd has run {name!r} in generation {manifest.generation}, its store is in generation {file.generation}: "
            f"this etcd is older than the run's last recovery; rebuild it: `laminar recover {manifest.store}`"
        )
    keys = Keys(name, manifest.generation)
    config = config_from(file.config, origin="run.json")
    return Run(coordination, keys, storage, file, config, clock, machine or this_machine(), manifest.config)


async def _same_life(run: Run) -> KeyValue:
    """The manifest in etcd, once no recovery is at work. Raises StoreError if the run is in another generation than the
    one that this process joined, or etcd has forgotten it."""
    deadline = run.clock.monotonic() + RECOVERY_WAIT_S
    while await run.coordination.get(run.keys.recovering) is not None:
        if run.clock.monotonic() >= deadline:
            raise StoreError(
                f"run {run.keys.run!r} is still being recovered after {RECOVERY_WAIT_S:.0f} s ({run.keys.recovering})"
            )
        log.info("waiting for the recovery of run %s to end", run.keys.run)
        await run.clock.sleep(1.0)
    kv = await run.coordination.get(run.keys.manifest)
    found = RunManifest.parse(kv.value).generation if kv else None
    if kv is None or found != run.keys.generation:
        raise StoreError(
            f"run {run.keys.run!r} was joined in generation {run.keys.generation}, etcd has "
            f"{'nothing of it' if found is None else f'generation {found}'} now: this worker must be started anew"
        )
    return kv


@asynccontextmanager
async def joined(
    run: Run, kind: str, *, endpoint: str = "", worker: str = "", links: dict[str, str] | None = None, rack: str = ""
) -> AsyncIterator[Member]:
    """Register as a worker for the time of the block, under the id `worker` or a new one; leaves at once (lease
    revoked) at its end."""
    worker = worker or boot_id(kind, run.machine)
    manifest = await _same_life(run)
    session = await Session.open(run.coordination, run.config.coordination.lease_ttl)
    try:
        record = WorkerRecord(
            kind=kind,
            id=worker,
            host=run.machine.host,
            pid=run.machine.pid,
            endpoint=endpoint,
            started_at_us=run.clock.now_us(),
            links=links or {},
            rack=rack,
        )
        membership = await Membership.join(session, run.coordination, run.keys, record, manifest)
        log.info("%s joined run %s", worker, run.keys.run)
        yield Member(run, worker, session, membership, Ledger(run.coordination, run.keys, worker, membership))
    finally:
        try:
            async with asyncio.timeout(5):
                await session.close()
        except TimeoutError:
            log.warning("%s could not revoke its lease within 5 s; it expires by itself", worker)
