"""The learning rate of each step."""

from __future__ import annotations

import math

from laminar.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Of the step with this number, from 0: linear over `warmup_steps` up to `learning_rate`, then half a cosine over
    `decay_steps` (Loshchilov and Hutter, SGDR, arXiv 1608.03983, equation 5, without restarts) down to `decay_to` of
    it, then constant. It depends on nothing but its arguments, so a replayed step has the rate that it had."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if not config.decay_steps:
        return config.learning_rate * warm
    done = min(1.0, max(0, step - config.warmup_steps) / config.decay_steps)
    kept = config.decay_to + (1 - config.decay_to) * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * warm * kept
