"""A load that dies half-way leaves weights that are no version: the engine says so and is not used again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from laminar.errors import EngineError
from laminar.workers.engines.base import FolderWeights
from laminar.workers.engines.vllm import VllmEngine
from laminar.workers.engines.vllm_worker import LaminarWorker


class WorkerThatFailsHalfWay(LaminarWorker):
    def __init__(self, folder: Path) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(folder)))

    def reload_weights(self, weights_iterator: Any) -> None:
        next(weights_iterator)
        raise MemoryError("no room for the second tensor")


class EngineProcess:
    """vLLM's client, as far as `load` uses it, in front of a worker in this process."""

    errored = False

    def __init__(self, worker: LaminarWorker) -> None:
        self.worker = worker

    async def collective_rpc(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self.worker, name)(*args)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, "tie_word_embeddings": True}))
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    return tmp_path


async def test_a_load_that_fails_half_way_ends_the_engine_and_not_the_version(folder: Path) -> None:
    """Case 5, where the failure comes too late to go on with the old weights."""
    engine = VllmEngine(folder, dtype="float32", max_running=1, max_model_len=8)
    engine._llm = EngineProcess(WorkerThatFailsHalfWay(folder))
    with pytest.raises(EngineError, match=r"version 6 failed half-way: MemoryError: no room.*restart"):
        await engine.load(FolderWeights(str(folder), 6, ""))
    assert engine.version == -1
    with pytest.raises(EngineError, match="holds no version any more"):
        await engine.check()
    with pytest.raises(EngineError, match="holds no version any more"):
        await anext(engine.generate("r", [1], max_tokens=1, temperature=1.0, stop_token_ids=[]))
