"""Who takes over the trajectories that lost their owner: a pure plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laminar.buffer.claims import Held


@dataclass(frozen=True)
class Candidate:
    """A living rollout: its loaded version (-1 before the first), and how many trajectories it has or will get."""

    id: str
    create_revision: int
    version: int
    trajectories: int


def assign(orphans: Sequence[Held], candidates: Sequence[Candidate]) -> list[tuple[Held, Candidate]]:
    """A rollout of the same version where there is one, else the least loaded one, which loads that version when
    it is empty. Among equals the least loaded, then the first by id: equal inputs give equal plans."""
    if not candidates:
        return []
    load = {c.id: c.trajectories for c in candidates}
    foreign: dict[int, Candidate] = {}
    plan: list[tuple[Held, Candidate]] = []
    for held in orphans:
        version = held.claim.version
        same = [c for c in candidates if c.version == version]
        if same:
            target = min(same, key=lambda c: (load[c.id], c.id))
        else:
            # All orphans of one absent version go to one rollout: each loading costs a drain.
            target = foreign.setdefault(version, min(candidates, key=lambda c: (load[c.id], c.id)))
        load[target.id] += 1
        plan.append((held, target))
    return plan
