"""Which kind of worker a run lacks, and since when. Pure: moments are given.

A worker that is stopped, cut off or starved loses its lease and says nothing itself; what is seen is that none of its
kind is left.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

AWAY_S = 15.0
"""Seconds after which a kind's absence is told: a worker that died is started again sooner."""


@dataclass
class Absences:
    """`away`: seconds since one was seen, of each kind that was seen once and has none left for AWAY_S or longer."""

    away: dict[str, float] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)

    def look(self, alive: Collection[str], now_s: float) -> list[str]:
        """Note which kinds are alive at a moment of the caller's clock; what is new of it, in sentences."""
        told = []
        for kind in sorted(self._seen.keys() | set(alive)):
            if kind in alive:
                if kind in self.away:
                    told.append(f"a {kind} is alive again, after {now_s - self._seen[kind]:.0f} s")
                    del self.away[kind]
                self._seen[kind] = now_s
            elif now_s - self._seen[kind] >= AWAY_S:
                if kind not in self.away:
                    told.append(absent(kind, now_s - self._seen[kind]))
                self.away[kind] = now_s - self._seen[kind]
        return told


def absent(kind: str, seconds: float) -> str:
    return (
        f"no {kind} is alive for {seconds:.0f} s: the lease of the last one ended, so it died, is stopped or cut off; "
        f"end it if it is stopped (kill -9), or start another: laminar worker {kind} --etcd HOST:PORT --run NAME"
    )
