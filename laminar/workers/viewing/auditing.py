"""`laminar audit`: opens a run's etcd (starting the embedded one if the run is not running) and store, and checks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from laminar.buffer.audit import AuditReport, check, gather
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import read_run
from laminar.buffer.schema import TABLES
from laminar.buffer.storage import Storage, open_storage
from laminar.clock import SystemClock
from laminar.errors import StoreError
from laminar.workers.context import open_run
from laminar.workers.supervisor.run_etcd import etcd_folder, etcd_of
from laminar.workers.tables import open_table

ONE = {
    "groups drawn": "group drawn",
    "trajectories committed": "trajectory committed",
    "batches decided": "batch decided",
    "versions recorded": "version recorded",
    "leftovers of ended workers": "leftover of an ended worker",
    "problems": "problem",
}


def run_audit(store: str, options: Mapping[str, str], endpoints: list[str]) -> tuple[list[str], str]:
    """Blocking: the problems found (none: the invariants hold), and a summary of what was checked."""
    report = asyncio.run(_audit(open_storage(store, options), endpoints))
    counts = ", ".join(counted(n, what) for what, n in report.checked.items())
    verdict = "all invariants hold" if report.ok else counted(len(report.problems), "problems")
    return report.problems, f"{verdict}: {counts}"


def counted(n: int, what: str) -> str:
    """`1 group drawn`, `2 groups drawn`: `what` is in the plural."""
    return f"{n} {ONE.get(what, what) if n == 1 else what}"


async def _audit(storage: Storage, endpoints: list[str]) -> AuditReport:
    file = await read_run(storage)
    async with etcd_of(storage, file, endpoints, create=False) as access:
        if access is None:
            raise StoreError(
                f"no etcd data of run {file.run!r} at {etcd_folder(storage, file.run)}: name its endpoints with "
                f"--etcd, or rebuild it from the store if it was lost: `laminar recover {storage.url}`"
            )
        return await _audit_at(storage, access, file.run)


async def _audit_at(storage: Storage, access: EtcdAccess, name: str) -> AuditReport:
    coordination = access.connect()
    try:
        run = await open_run(coordination, name, SystemClock(), storage)
        keys = Keys(name, run.keys.generation)
        tables = {table: open_table(run.storage, table) for table in TABLES}
        picture = await gather(
            coordination, keys, run.storage, tables,
            samples_per_prompt=run.config.sampling.samples_per_prompt,
            on_version_lost=run.config.rollout.on_version_lost,
            update=run.config.rollout.update,
        )  # fmt: skip
        return check(picture)
    finally:
        await coordination.close()
