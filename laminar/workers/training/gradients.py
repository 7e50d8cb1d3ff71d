"""When a run must end because its gradients are of no use. Counts live steps of one life of a trainer: replayed ones
are what they were, and a failed run that is tried again, with other settings, is judged by new ones."""

from __future__ import annotations

from collections.abc import Mapping

MAX_NONFINITE_IN_A_ROW = 3
"""One overflow is weather; three steps in a row without a usable gradient is a broken run."""


class Gradients:
    def __init__(self) -> None:
        self._in_a_row = 0

    def trained(self, metrics: Mapping[str, float | None]) -> None:
        """A step without an update, since no group had a signal, says nothing."""
        if metrics.get("skipped_nonfinite"):
            self._in_a_row += 1
        elif metrics.get("grad_norm") is not None:
            self._in_a_row = 0

    def failure(self) -> str:
        """Why the run must end; empty if it need not."""
        if self._in_a_row < MAX_NONFINITE_IN_A_ROW:
            return ""
        return (
            f"the gradient was not finite in {self._in_a_row} steps in a row (limit {MAX_NONFINITE_IN_A_ROW}), whose "
            "updates were skipped; lower trainer.learning_rate and run the same command again; if it fails again, the "
            "weights are spoilt already: start another run"
        )
