"""vLLM's outputs as chunks, and its step statistics as plain numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from laminar.errors import EngineError
from laminar.workers.engines.base import Chunk, EngineFinish
from laminar.workers.engines.pace import Pace
from laminar.workers.engines.requests import finite


def sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """The logprob of each sampled token; NaN where the engine gave none for it.

    `logprobs` is vLLM's: FlatLogprobs, or a dict {token: Logprob} a position. An entry's first token need not be the
    sampled one, so it is looked up.
    """
    if logprobs is None or len(logprobs) != len(token_ids):
        return []
    result = []
    for position, token in enumerate(token_ids):
        if hasattr(logprobs, "start_indices"):
            places = range(logprobs.start_indices[position], logprobs.end_indices[position])
            found = next((logprobs.logprobs[i] for i in places if logprobs.token_ids[i] == token), None)
        else:
            entry = logprobs[position].get(token)
            found = None if entry is None else entry.logprob
        result.append(float("nan") if found is None else float(found))
    return result


def chunk_of(request_id: str, output: Any) -> Chunk:
    completion = output.outputs[0]
    tokens = [int(token) for token in completion.token_ids]
    logprobs = finite(request_id, tokens, sampled_logprobs(tokens, completion.logprobs) if tokens else [])
    finish: EngineFinish | None = completion.finish_reason
    if finish not in (None, "stop", "length", "abort"):
        raise EngineError(f"request {request_id} ended in vLLM with {finish!r}; its log above has the cause")
    return Chunk(tokens, logprobs, finish)


def step_recorder(steps: dict[str, float], pace: Pace, loop: asyncio.AbstractEventLoop) -> type:
    """A class that vLLM instantiates and calls in the event loop after every step of the engine."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepRecorder(StatLoggerBase):  # type: ignore[misc, unused-ignore]  # untyped without vLLM
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.engine_index = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            before, steps["at"] = steps.get("at"), loop.time()
            if scheduler_stats is not None and iteration_stats is not None and before is not None:
                # Between two steps of a batch that does not just begin lies nothing but a step.
                if batch := int(steps.get("running", 0)):
                    pace.step(batch, int(iteration_stats.prompt_token_stats.computed), steps["at"] - before)
            if scheduler_stats is not None:
                steps["running"] = scheduler_stats.num_running_reqs
                steps["waiting"] = scheduler_stats.num_waiting_reqs
                steps["kv_usage"] = scheduler_stats.kv_cache_usage

        def log_engine_initialized(self) -> None:
            """Nothing to say: `start` logs."""

    return StepRecorder


def of_all_ranks(results: Sequence[dict[str, str]]) -> dict[str, str]:
    """What the workers of one engine answered to a load, as one answer: each rank maps the relay for itself, so that
    one may be refused what another has loaded. Then the engine's weights are of no version."""
    outcomes = {result["outcome"] for result in results}
    if len(outcomes) == 1 and "broken" not in outcomes:
        return results[0]
    rank, result = next((rank, result) for rank, result in enumerate(results) if result["outcome"] != "loaded")
    where = f"rank {rank} of {len(results)}: " if len(results) > 1 else ""
    return {"outcome": "broken", "error": f"{where}{result['error']}"}
