"""What the trainer shows of itself while it works."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.buffer.records import TrainerProgress
from laminar.workers.mirror import Bell

REWARDS_TOLD = 10


@dataclass
class Progress:
    """`rewards` holds the last ten steps; `metrics` are those of the newest; `truncated` and `barren` are warnings, or
    empty."""

    activity: str = "starting"
    metrics: dict[str, float | None] = field(default_factory=dict)
    rewards: dict[int, float | None] = field(default_factory=dict)
    truncated: str = ""
    barren: str = ""
    bell: Bell = field(default_factory=Bell)

    def trained(self, step: int, metrics: dict[str, float | None]) -> None:
        self.metrics = metrics
        self.rewards = {**dict(sorted(self.rewards.items())[1 - REWARDS_TOLD :]), step: metrics.get("reward_mean")}
        self.bell.ring()

    def record(self, step: int) -> TrainerProgress:
        return TrainerProgress(
            step=step, activity=self.activity, metrics=self.metrics, rewards=self.rewards,
            warnings=[warning for warning in (self.truncated, self.barren) if warning],
        )  # fmt: skip
