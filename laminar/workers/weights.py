"""Where a version can be had: the relay of this host, or the files of the store."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from laminar.buffer.coordination import KeyValue
from laminar.buffer.records import WorkerRecord
from laminar.errors import LaminarError
from laminar.workers.checkpoints import exported_version
from laminar.workers.context import Run
from laminar.workers.engines.base import FolderWeights, RelayWeights, WeightSource

log = logging.getLogger(__name__)


def local_relay(relays: Sequence[KeyValue], host: str) -> WorkerRecord | None:
    """The newest relay of `host`."""
    records = [(kv.create_revision, WorkerRecord.parse(kv.value)) for kv in relays]
    here = [(revision, r) for revision, r in records if r.host == host and r.endpoint]
    return max(here, key=lambda pair: pair[0])[1] if here else None


def relay_socket(record: WorkerRecord) -> str:
    return record.endpoint.removeprefix("unix:")


async def find_weights(run: Run, relays: Sequence[KeyValue], version: int, digest: str = "") -> WeightSource | None:
    """None when neither the relay nor a checkpoint has the version (now), with that digest if one is given: a relay
    holds a version from its sealing on, which may be before, or never followed by, its publication."""
    record = local_relay(relays, run.machine.host)
    if record is not None:
        try:
            status = await run.machine.relay(relay_socket(record), run.keys.run).status()
            for held in status.versions:
                if held.info.version == version and digest in ("", held.info.digest):
                    return RelayWeights(relay_socket(record), version, held.info.digest)
        except (LaminarError, OSError) as e:
            log.warning("the relay %s did not answer: %s", record.id, e)
    export = await exported_version(run.storage, version)
    return FolderWeights(export.folder, version, export.digest) if export else None
