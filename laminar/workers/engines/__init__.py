"""Inference engines behind one interface (`base.Engine`).

    rollout --generate/abort--> Engine --(vllm.py)--> engine process: vllm_worker.py --maps--> relay's memory
                                       --(transformers.py)--> a thread of this process

Invariants: an engine holds one version, which it has checked (`weights.py`) before it reports it; a prefix or KV
cache is never used under other weights than those that filled it; every token has a finite logprob of the
distribution that it was drawn from.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laminar.config import Config
    from laminar.workers.engines.base import Engine


def create_engine(config: Config, model_folder: Path) -> Engine:
    """The engine that `rollout.engine` names, not started. Imports of it are made here: vLLM's take seconds."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        from laminar.workers.engines.vllm import VllmEngine

        return VllmEngine(
            model_folder,
            dtype=config.model.dtype,
            max_running=rollout.max_running,
            max_model_len=rollout.max_model_len,
            kv_cache_mib=rollout.kv_cache_mib,
            threads=rollout.threads,
            tensor_parallel=rollout.tensor_parallel,
            chunk_bytes=config.relay.chunk_mib << 20,
        )
    from laminar.workers.engines.transformers import TransformersEngine

    return TransformersEngine(
        model_folder,
        dtype=config.model.dtype,
        max_running=rollout.max_running,
        max_model_len=rollout.max_model_len,
        threads=rollout.threads,
        chunk_bytes=config.relay.chunk_mib << 20,
    )
