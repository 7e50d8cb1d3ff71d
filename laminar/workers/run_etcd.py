"""The etcd of a run as one finds it from its store: named, configured, embedded and running, or started for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.manifest import RunFile
from laminar.buffer.storage import Storage
from laminar.config import config_from
from laminar.workers.local import coordination_service, listens


def etcd_folder(storage: Storage, run: str) -> Path:
    """Where the embedded etcd of a run keeps its data: beside a remote store, not in it."""
    return (Path(storage.absolute("")) if storage.local else Path("runs") / run) / "etcd"


@asynccontextmanager
async def etcd_of(
    storage: Storage, file: RunFile, endpoints: Sequence[str], *, create: bool
) -> AsyncIterator[EtcdAccess | None]:
    """`endpoints` empty: where the run says. An embedded etcd that does not run is started for the time of the block;
    if its data are not there it is made anew with `create`, else this gives None."""
    config = config_from(file.config, origin="run.json")
    configured = config.coordination.access()
    if endpoints or configured.endpoints:
        yield configured.at(endpoints) if endpoints else configured
        return
    folder = etcd_folder(storage, file.run)
    mark = folder / "endpoint"
    if mark.exists() and await listens(mark.read_text().strip()):
        yield EtcdAccess((mark.read_text().strip(),))
    elif create or (folder / "data").exists():
        async with coordination_service(config, folder.parent) as (own, _):
            yield own
    else:
        yield None
