"""`laminar audit`: opens a run's etcd (starting the embedded one if the run is not running) and store, and checks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from laminar.buffer.audit import AuditReport, check, gather
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import read_run
from laminar.buffer.schema import TABLES
from laminar.buffer.storage import Storage, open_storage
from laminar.clock import SystemClock
from laminar.config import config_from
from laminar.errors import StoreError
from laminar.workers.context import open_run
from laminar.workers.local import coordination_service, listens
from laminar.workers.tables import open_table


def run_audit(store: str, options: Mapping[str, str], endpoints: list[str]) -> tuple[list[str], str]:
    """Blocking: the problems found (none: the invariants hold), and a summary of what was checked."""
    report = asyncio.run(_audit(open_storage(store, options), endpoints))
    counted = ", ".join(f"{n} {what}" for what, n in report.checked.items())
    verdict = "all invariants hold" if report.ok else f"{len(report.problems)} problems"
    return report.problems, f"{verdict}: {counted}"


async def _audit(storage: Storage, endpoints: list[str]) -> AuditReport:
    file = await read_run(storage)
    config = config_from(file.config, origin="run.json")
    configured = config.coordination.access()
    if endpoints or configured.endpoints:
        return await _audit_at(storage, configured.at(endpoints) if endpoints else configured, file.run)
    root = Path(storage.absolute("")) if storage.local else Path("runs") / file.run
    mark = root / "etcd" / "endpoint"
    if mark.exists() and await listens(mark.read_text().strip()):
        return await _audit_at(storage, EtcdAccess((mark.read_text().strip(),)), file.run)
    if not (root / "etcd" / "data").exists():
        raise StoreError(f"no etcd data of run {file.run!r} at {root / 'etcd'}: name its endpoints with --etcd")
    async with coordination_service(config, root) as (own, _):
        return await _audit_at(storage, own, file.run)


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
        )  # fmt: skip
        return check(picture)
    finally:
        await coordination.close()
