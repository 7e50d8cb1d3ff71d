"""`laminar audit`: opens a run's etcd (starting the embedded one if the run is not running) and store, and checks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from laminar.buffer.audit import AuditReport, check, gather
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import read_run
from laminar.buffer.schema import TABLES
from laminar.buffer.storage import open_storage
from laminar.clock import SystemClock
from laminar.config import config_from
from laminar.errors import StoreError
from laminar.workers.context import open_run
from laminar.workers.local import coordination_service, listens
from laminar.workers.tables import open_table


def run_audit(store: str, endpoints: list[str]) -> tuple[list[str], str]:
    """Blocking: the problems found (none: the invariants hold), and a summary of what was checked."""
    report = asyncio.run(_audit(store, endpoints))
    counted = ", ".join(f"{n} {what}" for what, n in report.checked.items())
    verdict = "all invariants hold" if report.ok else f"{len(report.problems)} problems"
    return report.problems, f"{verdict}: {counted}"


async def _audit(store: str, endpoints: list[str]) -> AuditReport:
    storage = open_storage(store)
    file = await read_run(storage)
    config = config_from(file.config, origin="run.json")
    if endpoints:
        return await _audit_at(store, endpoints, file.run)
    if config.coordination.endpoints:
        return await _audit_at(store, config.coordination.endpoints, file.run)
    root = Path(storage.absolute("")) if storage.local else Path("runs") / file.run
    mark = root / "etcd" / "endpoint"
    if mark.exists() and await listens(mark.read_text().strip()):
        return await _audit_at(store, [mark.read_text().strip()], file.run)
    if not (root / "etcd" / "data").exists():
        raise StoreError(f"no etcd data of run {file.run!r} at {root / 'etcd'}: name its endpoints with --etcd")
    async with coordination_service(config, root) as (own, _):
        return await _audit_at(store, own, file.run)


async def _audit_at(store: str, endpoints: list[str], name: str) -> AuditReport:
    coordination = EtcdCoordination(endpoints)
    try:
        run = await open_run(coordination, name, SystemClock(), open_storage(store))
        keys = Keys(name, run.keys.generation)
        tables = {table: open_table(run.storage, table) for table in TABLES}
        picture = await gather(
            coordination, keys, run.storage, tables,
            samples_per_prompt=run.config.sampling.samples_per_prompt,
            on_version_lost=run.config.rollout.on_version_lost,
        )  # fmt: skip
        return check(picture)
    finally:
        await coordination.close()
