"""The learner by the config. torch is imported when one is created."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.config import Config

if TYPE_CHECKING:
    from laminar.workers.learning.learner import TorchLearner


def create_learner(config: Config, model_folder: Path) -> TorchLearner:
    """Of version 0: the model of the folder. Blocking. Raises ConfigError for a model that cannot be trained."""
    from laminar.workers.learning.learner import TorchLearner

    threads = config.trainer.threads or max(1, (os.cpu_count() or 1) - config.rollout.workers)
    return TorchLearner(
        model_folder,
        config.trainer.model_copy(update={"threads": threads}),
        temperature=config.sampling.temperature,
        dtype=config.model.dtype,
    )
