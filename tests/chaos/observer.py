"""What happens in a run's etcd, seen from beside it: every key as it is, and every change with its time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from laminar.buffer.coordination import Change, KeyValue, Listing
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.keys import Keys
from laminar.buffer.records import Claim, LeaderRecord, TableHead, TrainerHead, WeightsHead, WorkerRecord


@dataclass(frozen=True)
class Seen:
    """One change, and the monotonic time (seconds) at which it was seen."""

    change: Change
    at: float


class Observer:
    """Mirrors all keys of a run in a thread of its own. It survives restarts of etcd, as the watch does."""

    def __init__(self, endpoints: list[str], run: str) -> None:
        self.keys = Keys(run)
        self.items: dict[str, KeyValue] = {}
        self.changes: list[Seen] = []
        self.revision = 0
        self.hooks: list[Callable[[Change], None]] = []
        """Called in the observer's thread with each change, as soon as it is seen."""
        self._endpoints = endpoints
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._failure: BaseException | None = None
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the observer did not end within 10 s"

    def _run(self) -> None:
        self._task = self._loop.create_task(self._watch())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as e:
            self._failure = e
            raise
        finally:
            self._loop.close()

    async def _watch(self) -> None:
        coordination = EtcdCoordination(self._endpoints, retry_s=120)
        try:
            async with aclosing(coordination.watch(self.keys.prefix)) as events:
                async for event in events:
                    self._take(event)
        finally:
            await coordination.close()

    def _take(self, event: Listing | Change) -> None:
        if isinstance(event, Listing):
            self.items = {kv.key: kv for kv in event.snapshot.items}
            self.revision = event.snapshot.revision
            return
        for hook in list(self.hooks):
            hook(event)
        if event.kv is None:
            self.items.pop(event.key, None)
        else:
            self.items[event.key] = event.kv
        self.changes.append(Seen(event, time.monotonic()))
        self.revision = event.revision

    # -- what is there ------------------------------------------------------------------------------------------

    def value(self, key: str) -> str:
        """Empty if there is no such key."""
        assert self._failure is None, f"the observer failed: {self._failure!r}"
        kv = self.items.get(key)
        return kv.value if kv else ""

    def under(self, prefix: str) -> dict[str, KeyValue]:
        assert self._failure is None, f"the observer failed: {self._failure!r}"
        return {key: kv for key, kv in list(self.items.items()) if key.startswith(prefix)}

    def head(self) -> TrainerHead | None:
        value = self.value(self.keys.trainer)
        return TrainerHead.parse(value) if value else None

    def step(self) -> int:
        head = self.head()
        return head.step if head else 0

    def version(self) -> int:
        value = self.value(self.keys.weights)
        return WeightsHead.parse(value).version if value else -1

    def table(self, name: str = "experience") -> TableHead:
        value = self.value(self.keys.head(name))
        return TableHead.parse(value) if value else TableHead(lance_version=0, rows=0)

    def workers(self, kind: str) -> dict[str, WorkerRecord]:
        records = [WorkerRecord.parse(kv.value) for kv in self.under(self.keys.workers(kind)).values()]
        return {r.id: r for r in records}

    def id_of(self, kind: str, pid: int) -> str:
        return next((r.id for r in self.workers(kind).values() if r.pid == pid), "")

    def leader(self, role: str) -> str:
        value = self.value(self.keys.leader(role))
        return LeaderRecord.parse(value).worker if value else ""

    def claims(self) -> dict[str, Claim]:
        """By the name of the trajectory."""
        prefix = self.keys.claims
        return {key[len(prefix) :]: Claim.parse(kv.value) for key, kv in self.under(prefix).items()}

    def claims_of(self, worker: str) -> list[str]:
        return [name for name, claim in self.claims().items() if claim.owner == worker]

    def written_by(self, worker: str, after: int) -> list[str]:
        """Keys that this worker wrote after revision `after`, as their values tell."""
        return [
            f"{s.change.key} = {s.change.kv.value}"
            for s in list(self.changes)
            if s.change.revision > after and s.change.kv is not None and author(s.change.kv.value) == worker
        ]


def author(value: str) -> str:
    """The id of the worker that a record says wrote it or leads by it; empty if it does not say."""
    if not value.startswith("{"):
        return value
    record = json.loads(value)
    intent = record.get("committing") or {}
    fields = [record.get(f) for f in ("owner", "by", "decided_by", "worker", "id")] + [intent.get("key")]
    return next((str(f).split("/")[0] for f in fields if f), "")
