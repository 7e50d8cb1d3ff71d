"""What the trainer needs of a learner. `learner.TorchLearner` is the real one; the simulator has its twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from laminar.relay.layout import Layout
from laminar.relay.writing import Invitation


@dataclass(frozen=True)
class Sample:
    """One trajectory to train on. Lists but `prompt_ids` have one entry a token after the first prompt."""

    group: int
    sample: int
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    policy_mask: Sequence[bool]
    behaviour_logprobs: Sequence[float]
    reward: float
    version: int
    truncated: bool = False


@dataclass(frozen=True)
class SampleStats:
    """What `steps` keeps of one trained trajectory; means are over its policy tokens, None without any."""

    group: int
    sample: int
    advantage: float
    tokens: int
    mean_ratio: float | None
    clip_fraction: float | None
    policy_loss: float | None
    mean_logprob: float | None


@dataclass(frozen=True)
class StepResult:
    """`metrics`: number by name, None where a mean is over nothing."""

    samples: list[SampleStats]
    metrics: dict[str, float | None] = field(default_factory=dict)


class Learner(Protocol):
    """Blocking; the trainer runs it in a thread. Deterministic: equal state and batch, equal result."""

    @property
    def version(self) -> int: ...

    @property
    def layout(self) -> Layout:
        """Of the weights as published (names, dtypes and shapes of the Hugging Face model)."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What of the config shapes the steps to come, by the config's keys; JSON values."""
        ...

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Use these settings from the next step on; those that are not named stay. Raises ConfigError."""
        ...

    def train(self, batch: Sequence[Sample], fresh: Callable[[], Sequence[Sample]] | None = None) -> StepResult:
        """One optimizer step on whole groups: `version` grows by one. Raises LaminarError for a batch that it cannot
        train on; a gradient that is not finite changes no weights, and the metric `skipped_nonfinite` is 1.

        `fresh`, called just before the weights change, gives trajectories sampled under the very weights that the
        step starts from (none if there are none): the engine's logprobs are compared on them. They train nothing.
        """
        ...

    def stage(self) -> float:
        """Cast the weights to the publish dtype where that differs; the seconds it took."""
        ...

    @property
    def writers(self) -> int:
        """Processes of this host that write the weights together, each its part, if they are invited to."""
        ...

    def write_weights(self, buffer: memoryview, invitation: Invitation | None = None) -> int:
        """Copy the staged weights into `buffer` (layout.total_bytes long) at the layout's offsets: the stall. With an
        `invitation` to the arena that `buffer` is, the other writers have written their part when this returns; the
        bytes that this process wrote. Without one, it wrote all."""
        ...

    def save(self, folder: Path) -> None:
        """Write trainer state (weights, optimizer, schedule) into an empty folder: safetensors and JSON."""
        ...

    def load(self, folder: Path) -> None: ...

    def verify(self, folder: Path) -> None:
        """Raise WeightsError if `load` would; change nothing."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (model and tokenizer) that `from_pretrained` opens."""
        ...

    def close(self) -> None:
        """End what it runs beside this process, which at the latest ends with it."""
        ...
