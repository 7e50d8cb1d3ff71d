"""The etcd of a run as one finds it from its store: named, configured, embedded and running, or started for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import RunFile
from laminar.buffer.records import RunManifest
from laminar.buffer.storage import Storage
from laminar.config import Config, config_from
from laminar.errors import ConfigError, CoordinationError, CoordinationUnavailable
from laminar.workers.supervisor.etcd_process import EtcdProcess, find_etcd
from laminar.workers.supervisor.exclusion import only_here

log = logging.getLogger(__name__)

REACH_ETCD_S = 10.0


def etcd_folder(storage: Storage, run: str) -> Path:
    """Where the embedded etcd of a run keeps its data: beside a remote store, not in it."""
    return (Path(storage.absolute("")) if storage.local else Path("runs") / run) / "etcd"


@asynccontextmanager
async def etcd_of(
    storage: Storage, file: RunFile, endpoints: Sequence[str], *, create: bool
) -> AsyncIterator[EtcdAccess | None]:
    """`endpoints` empty: where the run says. An embedded etcd that does not run is started for the time of the block;
    if its data are not there it is made anew with `create`, else this gives None. Raises ConfigError if the run's
    folder is in use, and its etcd cannot be asked."""
    config = config_from(file.config, origin="run.json")
    configured = config.coordination.access()
    if endpoints or configured.endpoints:
        yield configured.at(endpoints) if endpoints else configured
        return
    folder = etcd_folder(storage, file.run)
    mark = folder / "endpoint"
    if (running := await _running(mark, file)) is not None:
        yield running
    elif create or (folder / "data").exists():
        async with coordination_service(config, folder.parent) as (own, _):
            yield own
    else:
        yield None


async def _running(mark: Path, file: RunFile) -> EtcdAccess | None:
    """The run's embedded etcd at the address that the file `mark` holds; None if it does not run. The file stays when
    its `laminar run` is killed, and the port may be another one's by then: what answers there must know this run."""
    try:
        endpoint = mark.read_text().strip()
    except FileNotFoundError:
        return None
    if not await listens(endpoint):
        return None
    access = EtcdAccess((endpoint,))
    if why := await stranger(access, file):
        log.warning("%s names %s, where the etcd of run %r is not: %s; it is left alone", mark, access, file.run, why)
        return None
    return access


async def stranger(access: EtcdAccess, file: RunFile) -> str:
    """Why what answers there is not the etcd of this run and store; empty if it is."""
    coordination = access.connect()
    try:
        async with asyncio.timeout(REACH_ETCD_S):
            kv = await coordination.get(Keys(file.run).manifest)
        if kv is None:
            return "the etcd there knows nothing of this run"
        manifest = RunManifest.parse(kv.value)
    except (TimeoutError, CoordinationError) as e:
        return f"what listens there gives no answer of an etcd ({str(e) or f'waited {REACH_ETCD_S:.0f} s'})"
    finally:
        await coordination.close()
    if manifest.store_id == file.store_id:
        return ""
    return (
        f"the etcd there has a run of this name with its store at {manifest.store} (id {manifest.store_id}, this one's "
        f"is {file.store_id})"
    )


async def reach(access: EtcdAccess) -> None:
    """Raises ConfigError naming the addresses and the time waited if no etcd answers, or what it refused."""
    coordination = access.connect()
    try:
        async with asyncio.timeout(REACH_ETCD_S):
            await coordination.get("/laminar/")
    except (TimeoutError, CoordinationUnavailable) as e:
        raise ConfigError(
            f"no etcd answers at {access} (waited {REACH_ETCD_S:.0f} s): start it, correct "
            "coordination.endpoints, or leave them empty to run an embedded one"
            + ("" if access.tls() else "; if it speaks TLS, set coordination.ca")
        ) from e
    except CoordinationError as e:
        raise ConfigError(f"etcd at {access} cannot be used: {e}") from e
    finally:
        await coordination.close()


@asynccontextmanager
async def coordination_service(config: Config, root: Path) -> AsyncIterator[tuple[EtcdAccess, EtcdProcess | None]]:
    """The way to the configured etcd, or to one that lives as long as the block."""
    if config.coordination.endpoints:
        access = config.coordination.access()
        await reach(access)
        yield access, None
        return
    folder = root / "etcd"
    mark = folder / "endpoint"
    await asyncio.to_thread(find_etcd)  # before anything is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot write to {folder}: {e.strerror}; choose a run.store that can be written") from e
    with only_here(folder, config.run.name) as locked:
        if not locked and mark.exists() and await listens(mark.read_text().strip()):
            raise ConfigError(
                f"the etcd of run {config.run.name!r} is running at {mark.read_text().strip()}: this run is being run "
                f"by another `laminar run`; stop that one, or choose another run.name; if something else listens there "
                f"by now, remove {mark}"
            )
        mark.unlink(missing_ok=True)  # of one that was killed: nobody must take what listens there now for this one
        etcd = EtcdProcess(folder / "data")
        await etcd.start()
        try:
            mark.write_text(etcd.endpoint)
            yield EtcdAccess((etcd.endpoint,)), etcd
        finally:
            await etcd.stop()
            mark.unlink(missing_ok=True)


async def listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(2):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
