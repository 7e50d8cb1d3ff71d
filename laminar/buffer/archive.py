"""Decisions of old steps, many in a file: etcd and `batches/` keep those of the newest steps only.

    etcd batches/<step>, offers/<version>/ ──fold──▶ batches/steps-<first>-<last>.jsonl, durable ──▶ keys and copies go

A block holds `BLOCK` steps from a multiple of `BLOCK` on, and its content is decided long before it is written: whoever
writes it writes the same. It is written before what it replaces is deleted, so that a reader who looks into etcd first
and into the archive afterwards misses nothing. The first line has the sha256 of the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from laminar.buffer.records import BatchDecision, Record
from laminar.buffer.storage import Storage
from laminar.errors import CoordinationError, CorruptSegment

BLOCK = 500
"""Steps of a file; etcd holds fewer than twice as many, beside those after the oldest checkpoint."""
NAME = re.compile(r"batches/steps-(\d{9,})-(\d{9,})\.jsonl")


class ArchivedStep(Record):
    """What a step meant, and the digests under which the version before it was made available again."""

    decision: BatchDecision
    offered: list[str]


def block_path(step: int) -> str:
    """Where the decision of `step` lies once it is archived."""
    first = step - step % BLOCK
    return f"batches/steps-{first:09d}-{first + BLOCK - 1:09d}.jsonl"


async def write_block(storage: Storage, steps: Sequence[ArchivedStep]) -> str:
    """Make a whole block durable; its path. `steps` are in order and begin with the block's first."""
    path = block_path(steps[0].decision.step)
    body = "".join(s.dump() + "\n" for s in steps).encode()
    first = json.dumps({"steps": len(steps), "sha256": hashlib.sha256(body).hexdigest()}).encode()
    await storage.write(path, first + b"\n" + body, overwrite=True)
    return path


async def read_block(storage: Storage, path: str) -> list[ArchivedStep]:
    """Raises NotFound, or CorruptSegment if the file is not what was written."""
    return parse_block(await storage.read(path), path)


def parse_block(data: bytes, path: str) -> list[ArchivedStep]:
    first, _, body = data.partition(b"\n")
    try:
        expected = json.loads(first)["sha256"]
        if hashlib.sha256(body).hexdigest() != expected:
            raise ValueError("its sha256 is another than its first line says")
        return [ArchivedStep.parse(line) for line in body.decode().splitlines()]
    except (ValueError, KeyError, TypeError, CoordinationError) as e:
        raise CorruptSegment(f"the archive of decisions {path} is damaged: {e}; restore it from a backup") from e


async def archived_paths(storage: Storage) -> list[str]:
    return [f.path for f in await storage.list("batches") if NAME.fullmatch(f.path)]


def archived_before(paths: Sequence[str]) -> int:
    """All steps before this one are in the archive (blocks are written in order)."""
    return max((int(m[2]) + 1 for p in paths if (m := NAME.fullmatch(p))), default=0)


async def read_archive(storage: Storage) -> list[ArchivedStep]:
    """All archived steps, in order."""
    return [s for path in await archived_paths(storage) for s in await read_block(storage, path)]
