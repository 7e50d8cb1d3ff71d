"""Which values of the config shape an optimizer step: recorded with each decision, so that a replay uses them again.

What is not here either decides which groups a step trains on (the decision itself keeps that) or only says when
something is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from laminar.config import TrainerConfig
from laminar.errors import ConfigError

LEARNER_FIELDS = (
    "learning_rate", "warmup_steps", "decay_steps", "decay_to", "betas", "weight_decay", "max_grad_norm", "advantage",
    "loss", "aggregation", "clip_low", "clip_high", "importance_cap", "kl_coefficient", "mask_truncated",
    "micro_batch_tokens", "share_prompts", "no_signal", "skip_no_signal", "deterministic", "threads",
)  # fmt: skip
"""Fields of `TrainerConfig`. `threads` as resolved: their number changes the order of sums, so the bits."""
TEMPERATURE = "sampling.temperature"
SETTINGS = (*(f"trainer.{name}" for name in LEARNER_FIELDS), TEMPERATURE)


def settings_of(config: TrainerConfig, temperature: float) -> dict[str, Any]:
    """By the config's keys, as JSON holds them."""
    values = config.model_dump(mode="json")
    return {**{f"trainer.{name}": values[name] for name in LEARNER_FIELDS}, TEMPERATURE: temperature}


def with_settings(
    config: TrainerConfig, temperature: float, settings: Mapping[str, Any]
) -> tuple[TrainerConfig, float]:
    """Config and temperature with these values in place. Raises ConfigError for a key that shapes no step, or a value
    that it cannot have."""
    unknown = sorted(settings.keys() - set(SETTINGS))
    if unknown:
        raise ConfigError(
            f"{unknown[0]} does not shape an optimizer step, so a recorded step cannot be trained with another value "
            f"of it; what can be set: {', '.join(SETTINGS)}"
        )
    fields = {key.removeprefix("trainer."): value for key, value in settings.items() if key != TEMPERATURE}
    try:
        changed = TrainerConfig.model_validate({**config.model_dump(), **fields})
    except ValidationError as e:
        raise ConfigError(f"these settings of a step are not usable: {e}") from e
    return changed, float(settings.get(TEMPERATURE, temperature))
