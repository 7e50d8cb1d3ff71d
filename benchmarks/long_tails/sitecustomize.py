"""Rollouts whose engine behaves as on a GPU: put this folder on PYTHONPATH of `laminar run`.

Two cores cannot run several engines without one slowing the other. So the steps of the tiny model, which take some
milliseconds of CPU, are stretched by sleeping to a latency curve of their own: nearly flat up to a knee, then growing
with the batch, as decode on a GPU is. Lengths are drawn from a log-normal distribution, by the trajectory, so
that they are the same whoever generates it, however often it moves. From the environment:

    LONG_TAILS_STEP_S    seconds of a step of one trajectory
    LONG_TAILS_KNEE      the batch at which it takes 1.5 times that
    LONG_TAILS_PREFILL   tokens prefilled a second
    LONG_TAILS_KV        tokens that its KV cache holds; 0: as the engine has it
    LONG_TAILS_MEDIAN    of the lengths, in tokens
    LONG_TAILS_SIGMA     of their logarithm
"""

from __future__ import annotations

import os
import sys


def install() -> None:
    import math
    import random
    import time
    from dataclasses import replace

    from laminar.workers import engines
    from laminar.workers.engines import transformers, vllm
    from laminar.workers.rollouts import equipment

    step_s, knee = float(os.environ["LONG_TAILS_STEP_S"]), int(os.environ["LONG_TAILS_KNEE"])
    prefill = float(os.environ["LONG_TAILS_PREFILL"])
    median, sigma = float(os.environ["LONG_TAILS_MEDIAN"]), float(os.environ["LONG_TAILS_SIGMA"])
    real_step, real_create = transformers.Batch.step, engines.create_engine
    real_settings = vllm.VllmEngine._settings
    short = [0, 0]

    def step(self, requests):  # type: ignore[no-untyped-def]
        began = time.monotonic()
        known = {id(member) for member in self._members}
        result = real_step(self, requests)
        # The reference engine fills its whole cache again at each arrival; a real one prefills what has come.
        new = sum(len(r.tokens) for r in requests if id(r) not in known)
        self.prefilled = new
        wanted = step_s * (1 + 0.5 * (len(requests) - 1) / max(1, knee - 1)) + new / prefill
        took = time.monotonic() - began
        short[0] += 1
        short[1] += took > wanted
        if short[0] % 500 == 0:
            print(f"long tails: {short[1]} of {short[0]} steps took longer than their curve", file=sys.stderr)
        time.sleep(max(0.0, wanted - took))
        return result

    class LongTails:
        """The engine, but for where its trajectories end."""

        def __init__(self, engine, most):  # type: ignore[no-untyped-def]
            self.engine, self.most = engine, most

        def __getattr__(self, name):  # type: ignore[no-untyped-def]
            return getattr(self.engine, name)

        async def start(self):  # type: ignore[no-untyped-def]
            capacity = await self.engine.start()
            return replace(capacity, kv_tokens=int(os.environ["LONG_TAILS_KV"]) or capacity.kv_tokens)

        async def generate(self, request_id, token_ids, **asked):  # type: ignore[no-untyped-def]
            if request_id.startswith("eval-"):
                async for chunk in self.engine.generate(request_id, token_ids, **asked):
                    yield chunk
                return
            name = "-".join(request_id.split("-")[:2])
            length = min(self.most, max(1, round(random.Random(name).lognormvariate(math.log(median), sigma))))
            left = max(1, length - (self.most - asked["max_tokens"]))
            asked |= {"max_tokens": left, "stop_token_ids": []}
            async for chunk in self.engine.generate(request_id, token_ids, **asked):
                if chunk.finish_reason == "length" and length < self.most:
                    chunk = replace(chunk, finish_reason="stop")
                yield chunk

    def settings(self, on_cpu):  # type: ignore[no-untyped-def]
        return real_settings(self, on_cpu) | {"worker_extension_cls": "long_tails_worker.StretchedWorker"}

    def create(config, *arguments):  # type: ignore[no-untyped-def]
        return LongTails(real_create(config, *arguments), config.sampling.max_tokens)

    # Else a trajectory that moves at what happens to be a stop token would end there.
    equipment.stop_token_ids = lambda *_: []
    transformers.Batch.step = step  # type: ignore[method-assign]
    vllm.VllmEngine._settings = settings  # type: ignore[method-assign]
    engines.create_engine = create


if "worker" in sys.orig_argv and "rollout" in sys.orig_argv:
    install()
