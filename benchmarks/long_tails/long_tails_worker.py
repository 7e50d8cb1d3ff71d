"""The engine process's side of `sitecustomize.py` where the engine is vLLM: each of its steps is stretched here."""

from __future__ import annotations

import os
import sys
import time

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from laminar.workers.engines.vllm_worker import LaminarWorker

STEP_S, KNEE = float(os.environ["LONG_TAILS_STEP_S"]), int(os.environ["LONG_TAILS_KNEE"])
PREFILL = float(os.environ["LONG_TAILS_PREFILL"])
real = GPUModelRunner.execute_model
counts = [0, 0]


def execute_model(self, scheduler_output, *arguments, **options):  # type: ignore[no-untyped-def]
    began = time.monotonic()
    result = real(self, scheduler_output, *arguments, **options)
    scheduled = scheduler_output.num_scheduled_tokens.values()
    if scheduled:
        new = sum(n for n in scheduled if n > 1)
        wanted = STEP_S * (1 + 0.5 * (len(scheduled) - 1) / max(1, KNEE - 1)) + new / PREFILL
        took = time.monotonic() - began
        counts[0] += 1
        counts[1] += took > wanted
        if counts[0] % 500 == 0:
            print(f"long tails: {counts[1]} of {counts[0]} steps took longer than their curve", file=sys.stderr)
        time.sleep(max(0.0, wanted - took))
    return result


GPUModelRunner.execute_model = execute_model  # type: ignore[method-assign]


class StretchedWorker(LaminarWorker):
    """Named in the engine's settings, so that vLLM imports this module in its own process."""
