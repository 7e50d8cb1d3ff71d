"""Loading a model to train, and torch's process-wide switches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from laminar.config import TrainerConfig


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    # Its bars of a second would break up the lines of the log, at each export as well.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    # No dropout: logprobs must be those of the policy that the engine samples from.
    return model.eval()


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Parameters only: `model.to(dtype)` would round the rotary frequencies as well, which engines keep in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def set_process(config: TrainerConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        # cuBLAS reads it at its first use; without it the deterministic mode refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling fresh memory only helps code that reads what nobody wrote, and costs a pass over each activation.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(config.deterministic)
