"""The part of the vLLM engine that runs inside the engine's own process, beside the model.

vLLM mixes `LaminarWorker` into its worker class; the rollout calls its methods by name over vLLM's RPC. Results are
plain data: an exception raised here would reach the rollout as text only, without its kind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from laminar.errors import WeightsError
from laminar.workers.engines import lifeline  # noqa: F401  each rank's process ends with the rollout's
from laminar.workers.engines.base import FolderWeights, RelayWeights, WeightSource
from laminar.workers.engines.weights import ModelTensors, opened

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


@contextmanager
def _expected_gaps(tied: bool) -> Iterator[None]:
    """Silence vLLM's warning, at every version, about layers that rightly get no weights; it stays for all others."""

    def unexpected(record: logging.LogRecord) -> bool:
        layer, _, what = record.getMessage().partition(": ")
        expected = layer.endswith("RotaryEmbedding") or (tied and layer == "ParallelLMHead")
        return not (expected and what == "Failed to load weights")

    logger = logging.getLogger(RELOAD_LOGGER)
    logger.addFilter(unexpected)
    try:
        yield
    finally:
        logger.removeFilter(unexpected)


class LaminarWorker:
    """Mixed into vLLM's worker: `self.model_runner`, `self.vllm_config` and `self.reload_weights` are vLLM's."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def laminar_identity(self) -> dict[str, int]:
        return {"pid": os.getpid()}

    def laminar_load(self, source: dict[str, Any], dtype: str, chunk_bytes: int) -> dict[str, str]:
        """Replace the weights. Runs between two steps of the engine, which waits for it.

        Returns {"outcome": "loaded"}, {"outcome": "refused", "error"}: nothing was touched, or
        {"outcome": "broken", "error"}: it failed half-way, the engine's weights are no version any more.
        """
        kind = source.pop("kind")
        wanted: WeightSource = RelayWeights(**source) if kind == "relay" else FolderWeights(**source)
        touched = False
        try:
            model = ModelTensors.of_folder(self.vllm_config.model_config.model, dtype)
            with opened(wanted, model, chunk_bytes=chunk_bytes) as tensors, torch.no_grad():
                touched = True
                with _expected_gaps(model.tied):
                    self.reload_weights(weights_iterator=iter(tensors.items()))
                self._refresh_tied_head()
        except Exception as e:  # the RPC would lose whether the engine is still whole
            error = str(e) if isinstance(e, WeightsError) else f"{type(e).__name__}: {e}"
            return {"outcome": "broken" if touched else "refused", "error": error}
        return {"outcome": "loaded"}

    def _refresh_tied_head(self) -> None:
        # On CPU a tied head keeps its own packed copy of the embeddings, which vLLM's reload does not renew.
        from vllm.platforms import current_platform

        head: Any = getattr(self.model_runner.get_model(), "lm_head", None)
        if not current_platform.is_cpu() or getattr(head, "cpu_linear", None) is None:
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
