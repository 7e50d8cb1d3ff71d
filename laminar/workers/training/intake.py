"""What the trainer sees of the committed experience: groups to choose from, errors, trajectories of its own version.

Reads only what was committed since the last look.
"""

from __future__ import annotations

import logging
from collections import deque

from laminar.buffer.sampler import OpenGroups, Outcome, to_retire
from laminar.buffer.table import Table
from laminar.clock import Clock
from laminar.config import Config
from laminar.errors import StoreError
from laminar.workers.learning.base import Sample
from laminar.workers.training.length_bias import LengthBias
from laminar.workers.training.step_metrics import SAMPLE_COLUMNS, sample_of

log = logging.getLogger(__name__)

ERROR_WINDOW = 64
OUTCOME_COLUMNS = ["group", "sample", "status", "error", "reward", "commit_seq"]
BARREN_GROUPS, BARREN_STEPS = 1_000, 100
"""So many complete groups, and so many steps' worth of them, without a signal in any end the run."""
WARN_STEPS = 4
"""So many steps' worth of them are told."""
FRESH_TRAJECTORIES = 8
FRESH_POLL_S = 0.25


class Intake:
    """`open` holds the groups that no step has consumed yet."""

    def __init__(self, config: Config, experience: Table, clock: Clock) -> None:
        self.config = config
        self.experience = experience
        self.clock = clock
        self.open = OpenGroups(
            config.sampling.samples_per_prompt, baseline=config.trainer.advantage != "reinforce++"
        )
        self.lengths = LengthBias()
        self._scanned = -1
        self._looked = False
        self._forgiven = 0
        self._recent: deque[tuple[str, str]] = deque(maxlen=ERROR_WINDOW)

    async def scan(self) -> None:
        """Take in what was committed since the last look."""
        # Not of all that was committed before this trainer: a resumed run may have millions of rows.
        lengths = ["policy_mask"] if self._looked else []
        rows = await self.experience.scan_since(self._scanned, [*OUTCOME_COLUMNS, *lengths])
        self._looked = True
        if rows.num_rows == 0:
            return
        if lengths:
            self.lengths.finished(rows["policy_mask"])
            rows = rows.drop_columns(lengths)
        outcomes = rows.to_pylist()
        self._scanned = max(o["commit_seq"] for o in outcomes)
        self.open.add(Outcome(o["group"], o["sample"], o["status"], o["reward"], o["commit_seq"]) for o in outcomes)
        self._recent.extend((o["status"], o["error"] or "") for o in outcomes)

    def forgive(self) -> None:
        """Errors of an earlier life ended that one, if they had to; what came of a remedy is judged by new ones."""
        self._recent.clear()
        self._forgiven = to_retire(self.open, self.config.trainer.groups_per_step, self.config.trainer.no_signal)

    def failure(self) -> str:
        """Why the run must end: a reward or environment that fails nearly always must not look like a slow run. Empty
        if it need not."""
        errors = [(status, error) for status, error in self._recent if status != "ok"]
        window = min(ERROR_WINDOW, 2 * self.config.sampling.samples_per_prompt)
        limit = self.config.trainer.max_error_share
        if len(self._recent) < window or len(errors) <= limit * len(self._recent):
            return ""
        status, error = errors[-1]
        return (
            f"{len(errors)} of the last {len(self._recent)} trajectories ended with an error (limit {limit:.0%}, "
            f"trainer.max_error_share); the last: {status}: {error}"
        )

    def barren(self, waiting: int) -> str:
        """A warning when `waiting` complete groups, of which none can be trained on, are a few steps' worth, and again
        at each tenth of what ends the run: it changes only then."""
        new, limit = waiting - self._forgiven, self._barren_limit()
        first = min(WARN_STEPS * self.config.trainer.groups_per_step, limit // 10)
        if new < first:
            return ""
        return self._without_signal(max(first, 10 * new // limit * limit // 10))

    def too_barren(self, waiting: int) -> str:
        """Why the run must end: rewards that never differ within a group would have it draw for ever, and learn
        nothing. Empty if it need not."""
        new, limit = waiting - self._forgiven, self._barren_limit()
        return f"{self._without_signal(new)} (limit {limit})" if new >= limit else ""

    def _barren_limit(self) -> int:
        return max(BARREN_GROUPS, BARREN_STEPS * self.config.trainer.groups_per_step)

    def _without_signal(self, groups: int) -> str:
        return (
            f"{groups} groups without a step among them have nothing to learn from: within each, all rewards are equal "
            "(or there are none); the prompts are too hard or too easy for this model, or the reward cannot tell its "
            "replies apart"
        )


class FreshTrajectories:
    """Collects, while a step trains, a few trajectories that rollouts finish under the very version it starts from.

    `samples` is replaced whole, so that the learner's thread reads it at any time."""

    def __init__(self, experience: Table, clock: Clock, version: int) -> None:
        self.experience = experience
        self.clock = clock
        self.version = version
        self.samples: tuple[Sample, ...] = ()

    def __call__(self) -> tuple[Sample, ...]:
        return self.samples

    async def collect(self) -> None:
        """Until there are enough; cancel it when the step is trained."""
        condition = f"version = {self.version} AND status = 'ok'"
        while len(self.samples) < FRESH_TRAJECTORIES:
            try:
                rows = await self.experience.read(SAMPLE_COLUMNS, filter=condition, limit=FRESH_TRAJECTORIES)
            except StoreError as e:
                log.warning("no trajectory of version %d can be compared with the engine: %s", self.version, e)
                return
            self.samples = tuple(sample_of(row) for row in rows.to_pylist())
            await self.clock.sleep(FRESH_POLL_S)
