"""Finished trajectories as rows of the experience table, and their durable incoming segments."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from laminar.buffer.keys import trajectory_name
from laminar.buffer.partials import Partial
from laminar.buffer.records import Incoming
from laminar.buffer.schema import EXPERIENCE
from laminar.buffer.segments import encode
from laminar.buffer.storage import Storage
from laminar.errors import StoreError


@dataclass(frozen=True)
class Finished:
    """A trajectory with its outcome. `reward` is None unless `status` is 'ok'. Times are UTC microseconds."""

    group: int
    sample: int
    prompt_index: int
    epoch: int
    partial: Partial
    finish_reason: str
    status: str
    error: str
    reward: float | None
    reward_parts: dict[str, float]
    text: str
    attempts: int
    finished_at: int
    metadata: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise StoreError if this row would break invariant 2 of the audit."""
        p, name = self.partial, trajectory_name(self.group, self.sample)
        if not len(p.token_ids) == len(p.policy_mask) == len(p.logprobs):
            raise StoreError(
                f"trajectory {name}: {len(p.token_ids)} tokens, {len(p.policy_mask)} mask entries and "
                f"{len(p.logprobs)} logprobs; they must be as many"
            )
        if not all(math.isfinite(x) for x in p.logprobs):
            raise StoreError(f"trajectory {name} has a logprob that is not finite")
        if (self.reward is None) != (self.status != "ok"):
            raise StoreError(f"trajectory {name}: status {self.status!r} does not go with reward {self.reward}")

    def row(self) -> dict[str, Any]:
        p = self.partial
        return {
            "group": self.group,
            "sample": self.sample,
            "prompt_index": self.prompt_index,
            "epoch": self.epoch,
            "prompt_ids": list(p.prompt_ids),
            "token_ids": list(p.token_ids),
            "policy_mask": list(p.policy_mask),
            "logprobs": list(p.logprobs),
            "span_start": [s.start for s in p.spans],
            "span_version": [s.version for s in p.spans],
            "span_worker": [s.worker for s in p.spans],
            "span_digest": [s.digest for s in p.spans],
            "version": min((s.version for s in p.spans), default=-1),
            "turns": p.turn + 1,
            "finish_reason": self.finish_reason,
            "status": self.status,
            "error": self.error,
            "reward": self.reward,
            "reward_parts": json.dumps(self.reward_parts),
            "text": self.text,
            "metadata": json.dumps(self.metadata),
            "started_at": p.started_at,
            "finished_at": self.finished_at,
            "attempts": self.attempts,
            "commit_seq": -1,
        }


async def write_incoming(
    storage: Storage, worker: str, segment: str, finished: Sequence[Finished]
) -> Incoming:
    """Make the rows durable under `incoming/experience/<segment>.arrow`; they count once registered."""
    for f in finished:
        f.check()
    batch = pa.RecordBatch.from_pylist([f.row() for f in finished], schema=EXPERIENCE)
    path = incoming_path("experience", segment)
    await storage.write(path, encode(EXPERIENCE, [batch]))
    names = [trajectory_name(f.group, f.sample) for f in finished]
    return Incoming(table="experience", path=path, rows=len(finished), worker=worker, trajectories=names)


def incoming_path(table: str, segment: str) -> str:
    return f"incoming/{table}/{segment}.arrow"
