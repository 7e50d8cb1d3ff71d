"""Which processes are of no use to their run any more though they live: a pure watch, moments are given.

A worker that hangs, or was stopped, loses its lease, and with it all that it had; what it does not do is end, so that
nothing starts another. It is given ample time to come back by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

HUNG_S = 900.0
"""Seconds outside of the run after which a living process is taken for hung."""
UNSEEN_S = 10.0
"""Nobody looked for longer than that: etcd was away, or who looks was stopped. Such time counts against nobody."""


@dataclass
class Hung:
    limit_s: float = HUNG_S
    _seen: dict[int, float] = field(default_factory=dict)
    """When each process was last seen in the run, in the moments of a clock that stood still while nobody looked."""
    _looked_at: float | None = None

    def look(self, alive: Collection[int], joined: Collection[int], now_s: float) -> list[int]:
        """Processes to end. `alive`: those that live, of the workers that are started again when they end; `joined`:
        those in the run. One that has never joined yet loads its model, for however long."""
        unseen = now_s - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now_s
        pause = unseen if unseen > UNSEEN_S else 0.0
        self._seen = {pid: at + pause for pid, at in self._seen.items() if pid in alive}
        self._seen |= {pid: now_s for pid in alive if pid in joined}
        return sorted(pid for pid, at in self._seen.items() if now_s - at >= self.limit_s)
