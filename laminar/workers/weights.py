"""Where a version can be had: the relay of this host, or the files of the store."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from laminar.buffer.coordination import KeyValue
from laminar.buffer.records import RelayLoad, WeightsHead, WorkerRecord
from laminar.errors import LaminarError, StoreError
from laminar.workers.context import Run
from laminar.workers.engines.base import FolderWeights, RelayWeights, WeightSource
from laminar.workers.exports import exported_version
from laminar.workers.machine import RelayAccess

log = logging.getLogger(__name__)

FETCH_S = 120.0
"""Seconds within which a relay must bring an older version from another host, before a checkpoint is looked for."""


def local_relay(relays: Sequence[KeyValue], host: str) -> WorkerRecord | None:
    """The newest relay of `host`."""
    records = [(kv.create_revision, WorkerRecord.parse(kv.value)) for kv in relays]
    here = [(revision, r) for revision, r in records if r.host == host and r.endpoint]
    return max(here, key=lambda pair: pair[0])[1] if here else None


def relay_socket(record: WorkerRecord) -> str:
    return record.endpoint.removeprefix("unix:")


async def held_digest(relay: RelayAccess, version: int, digest: str) -> str:
    """The digest of what the relay holds of this version, empty if it does not, or under another digest."""
    versions = (await relay.status()).versions
    return next((v.info.digest for v in versions if v.info.version == version and digest in ("", v.info.digest)), "")


async def held_elsewhere(run: Run, relay: str, version: int, digest: str) -> str:
    """The digest of an older version that another living relay reports to hold; empty if none does. The newest one
    comes along the chain by itself."""
    kv = await run.coordination.get(run.keys.weights)
    if kv is not None and WeightsHead.parse(kv.value).version == version:
        return ""
    prefix = f"{run.keys.loads_root}relay/"
    for kv in (await run.coordination.range(prefix)).items:
        found = RelayLoad.parse(kv.value).held.get(version, "")
        if kv.key != f"{prefix}{relay}" and found and digest in ("", found):
            return found
    return ""


async def find_weights(run: Run, relays: Sequence[KeyValue], version: int, digest: str = "") -> WeightSource | None:
    """None when neither a relay nor a checkpoint has the version (now), with that digest if one is given: a relay
    holds a version from its sealing on, which may be before, or never followed by, its publication.

    What only another host's relay holds, this one's fetches first, unless it is the newest, which comes anyhow."""
    record = local_relay(relays, run.machine.host)
    if record is not None:
        relay = run.machine.relay(relay_socket(record), run.keys.run)
        try:
            held = await held_digest(relay, version, digest)
            if not held and (elsewhere := await held_elsewhere(run, record.id, version, digest)):
                await relay.fetch(version, elsewhere, FETCH_S)
                held = await held_digest(relay, version, elsewhere)
            if held:
                return RelayWeights(relay_socket(record), version, held)
        except (LaminarError, OSError) as e:
            log.warning("the relay %s has no version %d: %s", record.id, version, e)
    try:
        export = await exported_version(run.storage, version)
    except StoreError as e:
        log.warning("version %d is not to be had from its checkpoint: %s", version, e)
        return None
    return FolderWeights(export.folder, version, export.digest) if export else None
