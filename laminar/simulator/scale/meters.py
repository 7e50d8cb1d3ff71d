"""What a simulated job is measured by, over the steps after the warm-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laminar.simulator.scale.engine import Engine
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.split import Split


@dataclass(frozen=True)
class Outcome:
    """Of the measured steps. Idle shares are of GPU time; in turns, `rollout_idle` and `trainer_idle` are those of the
    GPUs, which are one and the same. `kv_over_time`: (seconds, share of the engines' KV cache) from the very start.
    `staleness`: trained trajectories by how many versions they were old. `generated_per_s`: policy tokens."""

    policy: str
    gpus: int
    rollouts: int
    rollout_gpus: int
    trainer_gpus: int
    steps: int
    seconds: float
    tokens_per_s: float
    trajectories_per_s: float
    generated_per_s: float
    rollout_idle: float
    trainer_idle: float
    kv_share: float
    staleness: dict[int, int]
    moved: int = 0
    refilled_tokens: int = 0
    preempted: int = 0
    kv_over_time: list[tuple[float, float]] = field(default_factory=list)
    plan_ms: list[float] = field(default_factory=list, compare=False)
    """Milliseconds of a core that each plan of repack took."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def staleness_mean(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / max(1, sum(self.staleness.values()))

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)

    def staleness_below(self, age: int) -> float:
        """Share of the trained trajectories that were fresher than that."""
        return sum(n for a, n in self.staleness.items() if a < age) / max(1, sum(self.staleness.values()))

    def as_json(self) -> dict[str, Any]:
        """Equal for equal seeds."""
        values = asdict(self)
        del values["plan_ms"]
        return values | {
            "step_s": self.step_s, "staleness_mean": self.staleness_mean, "staleness_max": self.staleness_max,
        }  # fmt: skip


@dataclass
class Meter:
    """`trained` is told of each step, in order; the first `warmup_steps` of them count for nothing."""

    name: str
    job: Job
    split: Split
    engines: Sequence[Engine]
    began: float = 0.0
    ended: float = 0.0
    steps: int = 0
    tokens: int = 0
    trajectories: int = 0
    trainer_busy_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    kv_over_time: list[tuple[float, float]] = field(default_factory=list)
    _before: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def complete(self) -> bool:
        job = self.job.settings.job
        return self.steps >= job.steps + job.warmup_steps

    def trained(self, now: float, groups: Sequence[int], ages: Counter[int], train_s: float) -> None:
        """A step has ended. `ages`: its trajectories by staleness."""
        self.steps += 1
        warmup = self.job.settings.job.warmup_steps
        if self.steps > warmup:
            trajectories = len(groups) * self.job.samples
            self.tokens += trajectories * self.job.prompt_tokens + int(self.job.lengths.of_groups(groups).sum())
            self.trajectories += trajectories
            self.trainer_busy_s += train_s
            self.staleness.update(ages)
            self.ended = now
        if self.steps == warmup:
            self.start(now)

    def start(self, now: float) -> None:
        self.began = now
        self._before = self._sums()

    def sample(self, now: float) -> None:
        share = sum(e.kv for e in self.engines) / sum(e.kv_tokens for e in self.engines)
        self.kv_over_time.append((now, share))

    def _sums(self) -> tuple[float, ...]:
        return (
            sum(e.busy_s for e in self.engines),
            sum(e.kv_seconds for e in self.engines),
            sum(e.generated for e in self.engines),
        )

    def outcome(self, moved: int = 0, plan_ms: list[float] | None = None) -> Outcome:
        seconds = self.ended - self.began
        busy, kv, generated = (after - b for after, b in zip(self._sums(), self._before, strict=True))
        # In turns, GPUs that do not make up a whole engine are idle while the others generate.
        engine_gpus = len(self.engines) * self.job.costs.tensor_parallel
        rollout_share = busy / (seconds * len(self.engines)) * engine_gpus / self.split.rollout_gpus
        trainer_share = self.trainer_busy_s / seconds
        together = self.split.rollout_gpus + self.split.trainer_gpus > self.job.settings.cluster.gpus
        if together:
            rollout_share = trainer_share = rollout_share + trainer_share
        return Outcome(
            policy=self.name,
            gpus=self.job.settings.cluster.gpus,
            rollouts=self.split.rollouts,
            rollout_gpus=self.split.rollout_gpus,
            trainer_gpus=self.split.trainer_gpus,
            steps=self.job.settings.job.steps,
            seconds=seconds,
            tokens_per_s=self.tokens / seconds,
            trajectories_per_s=self.trajectories / seconds,
            generated_per_s=generated / seconds,
            rollout_idle=max(0.0, 1 - rollout_share),
            trainer_idle=max(0.0, 1 - trainer_share),
            kv_share=kv / (seconds * sum(e.kv_tokens for e in self.engines)),
            staleness=dict(sorted(self.staleness.items())),
            moved=moved,
            refilled_tokens=round(sum(e.refilled for e in self.engines)),
            preempted=sum(e.preempted for e in self.engines),
            kv_over_time=self.kv_over_time,
            plan_ms=plan_ms or [],
        )
