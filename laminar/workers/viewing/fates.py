"""What became of the groups that a run consumed: read from the decisions, which lie in the store."""

from __future__ import annotations

from dataclasses import dataclass

from laminar.buffer.archive import parse_block
from laminar.buffer.records import BatchDecision
from laminar.buffer.sampler import ERROR, NO_SIGNAL, REMAINDER
from laminar.errors import StoreError
from laminar.workers.viewing.inspect import StoreView

WHY_RETIRED = {
    NO_SIGNAL: "its rewards were all equal, so there was nothing to learn from it",
    ERROR: "too few of its trajectories ended without an error",
    REMAINDER: "the run ended before it could fill a batch",
}


@dataclass(frozen=True)
class Consumed:
    """How a group was consumed: `step` trained it (`reason` empty), or its decision retired it for `reason`."""

    step: int
    reason: str = ""

    @property
    def why(self) -> str:
        return WHY_RETIRED.get(self.reason, "")


def decisions(store: StoreView) -> list[BatchDecision]:
    """All decided batches, by step, from the archive and the copies that lie beside the batch files."""
    archived = [step.decision for path, data in store.files("batches", ".jsonl") for step in parse_block(data, path)]
    found = []
    for path, data in store.files("batches", ".json"):
        try:
            found.append(BatchDecision.model_validate_json(data))
        except ValueError as e:
            raise StoreError(f"the copy of a decision at {path} is unreadable: {e}") from e
    # A copy that was archived may not have been deleted yet.
    seen = {decision.step for decision in archived}
    found = [decision for decision in found if decision.step not in seen or not decision.trained]
    return sorted([*archived, *found], key=lambda decision: decision.step)


def consumed(store: StoreView, group: int) -> Consumed | None:
    """None while the group is open, or was never drawn."""
    for decision in decisions(store):
        if group in decision.trained:
            return Consumed(decision.step)
        if group in decision.retired:
            return Consumed(decision.step, decision.retired[group])
    return None
