"""The learner by the config. torch is imported when one is created."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.config import Config
from laminar.errors import ConfigError

if TYPE_CHECKING:
    from laminar.workers.learning.learner import TorchLearner


def create_learner(config: Config, model_folder: Path) -> TorchLearner:
    """Of version 0: the model of the folder. Blocking. Raises ConfigError for a model that cannot be trained, or for
    more devices than there are."""
    from laminar.workers.learning.learner import TorchLearner

    devices = config.trainer.devices
    left = (os.cpu_count() or 1) - config.rollout.workers
    trainer = config.trainer.model_copy(update={"threads": config.trainer.threads or max(1, left // devices)})
    temperature, dtype = config.sampling.temperature, config.model.dtype
    if devices == 1:
        return TorchLearner(model_folder, trainer, temperature=temperature, dtype=dtype)
    import torch

    from laminar.workers.learning.sharded.learner import LeadingLearner

    if torch.cuda.is_available() and torch.cuda.device_count() < devices:
        raise ConfigError(
            f"trainer.devices = {devices}, but the trainer sees {torch.cuda.device_count()} GPUs; lower it, or give "
            "the trainer more (CUDA_VISIBLE_DEVICES)"
        )
    return LeadingLearner(model_folder, trainer, temperature=temperature, dtype=dtype, devices=devices)
