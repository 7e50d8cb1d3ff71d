"""vLLM as an engine: its AsyncLLM in this process, the model in a process of its own.

One engine process a rollout. Weights come straight from the relay's memory, mapped by the engine process
(`vllm_worker.py`); no tensor passes through this one. The prefix cache is isolated by a salt that is new at each load.
Engine death is seen by vLLM's own monitor (about a second), a hang by `check`; the engine process in turn dies with
this one, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.errors import EngineError, WeightsError
from laminar.workers.engines.base import (
    Chunk,
    EngineCapacity,
    EngineLoad,
    RelayWeights,
    WeightSource,
)
from laminar.workers.engines.lifeline import engine_processes_tied_to_this_one, kill_left, sockets_of_this_one
from laminar.workers.engines.pace import Pace
from laminar.workers.engines.requests import token_budget
from laminar.workers.engines.vllm_output import chunk_of, of_all_ranks, step_recorder

if TYPE_CHECKING:
    from laminar.workers.engines.weights import ModelTensors

log = logging.getLogger(__name__)

START_DEADLINE_S = 600.0
"""Large models compile kernels and capture graphs at start."""
LOAD_DEADLINE_S = 600.0
CLOSE_GRACE_S = 1.0
"""Seconds for the engine process to end by itself; then it is killed. It holds nothing that needs saving."""
STALL_S = 300.0
"""Seconds without a step, though requests run, after which the engine counts as hung."""
CPU_KV_CACHE_MIB = 256
CPU_BLOCK_TOKENS = 32
"""vLLM's default of 128 on CPU makes the prefix cache useless for short prompts: it works on whole blocks."""
PROBE_TOKENS = 2


def prepare_environment(*, on_cpu: bool, threads: int) -> None:
    """Set what vLLM and torch read from the environment of this process and of the engine's, before the import."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if on_cpu:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        # Without it the first request for logprobs compiles a helper with g++ for 16 seconds.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        # On a CPU it would start a worker process beside the engine's and pin it to the first core; and each rank of
        # several it would give a memory node of its own, which small machines do not have.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@dataclass
class _Live:
    since: float
    aborted: bool = False


class VllmEngine:
    """Engine (see `base.Engine`) on vLLM, on CUDA or, with the vllm-cpu package, on a CPU.

    `kv_cache_mib` 0: 256 MiB on a CPU, vLLM's own share of the memory on CUDA. `threads`: of the engine on a CPU.
    `tensor_parallel`: devices that share the model, each with a worker process of its own that maps the relay's memory.
    `chunk_bytes`: the relay's, for the digest of weights in a folder.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: str,
        max_running: int,
        max_model_len: int,
        kv_cache_mib: int = 0,
        threads: int = 1,
        tensor_parallel: int = 1,
        chunk_bytes: int = 16 << 20,
    ) -> None:
        self.model_folder = str(model_folder)
        self.dtype = dtype
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.kv_cache_mib = kv_cache_mib
        self.threads = threads
        self.tensor_parallel = tensor_parallel
        self.chunk_bytes = chunk_bytes
        self._processes: list[int] = []
        self._version = -1
        self._digest = ""
        self._loads = 0
        self._llm: Any = None
        self._closed = False
        self._sockets = contextlib.ExitStack()
        self._broken = ""
        self._model: ModelTensors | None = None
        self._capacity = EngineCapacity(max_running, max_model_len, 0)
        self._live: dict[str, _Live] = {}
        self._load_lock = asyncio.Lock()
        self._ready = asyncio.Event()
        self._steps: dict[str, float] = {}
        self._pace = Pace(max_running)

    @property
    def version(self) -> int:
        return self._version

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def process_id(self) -> int:
        """Of the model's process, of its first rank if there are several; 0 before the start."""
        return self._processes[0] if self._processes else 0

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> EngineCapacity:
        from laminar.workers.engines.weights import ModelTensors, check_ranks

        self._model = await asyncio.to_thread(ModelTensors.of_folder, self.model_folder, self.dtype)
        if self.tensor_parallel > 1:
            await asyncio.to_thread(check_ranks, self.model_folder, self._model, self.tensor_parallel)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._built(asyncio.get_running_loop())
                identities = await self._llm.collective_rpc("laminar_identity")
                self._processes = [int(identity["pid"]) for identity in identities]
                await self._probe()
        except TimeoutError as e:
            await self.close()
            raise EngineError(f"vLLM did not start in {START_DEADLINE_S:.0f} s with model {self.model_folder}") from e
        except (EngineError, asyncio.CancelledError):
            await self.close()
            raise
        except Exception as e:  # vLLM raises whatever its many parts raise
            await self.close()
            raise EngineError(
                f"vLLM cannot start with model {self.model_folder} (dtype {self.dtype}, max_model_len "
                f"{self.max_model_len}, {self.kv_cache_mib or 'default'} MiB of KV cache): {e}; the engine's own log "
                "above has the cause"
            ) from e
        cache = self._llm.vllm_config.cache_config
        self._capacity = EngineCapacity(self.max_running, self.max_model_len, cache.num_gpu_blocks * cache.block_size)
        log.info("vLLM started pid=%d kv_tokens=%d", self.process_id, self._capacity.kv_tokens)
        return self._capacity

    def _built(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """`_build` in a daemon thread: one of a pool would keep a process that is told to stop until vLLM is up."""
        built: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if built.done():
                return
            if error is None:
                built.set_result(None)
            else:
                built.set_exception(error)

        def run() -> None:
            error = None
            try:
                self._build(loop)
            except Exception as e:  # handed to whoever waits
                error = e
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, error)

        self._closed = False
        threading.Thread(target=run, name="vllm-start", daemon=True).start()
        return built

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        import torch

        on_cpu = not torch.cuda.is_available()
        prepare_environment(on_cpu=on_cpu, threads=self.threads)
        self._sockets.enter_context(sockets_of_this_one())
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as e:
            raise EngineError(f"vLLM cannot be imported ({e}); install laminar[cpu] or laminar[cuda]") from e
        if current_platform.is_cpu() != on_cpu:
            raise EngineError(
                f"torch {'has no' if on_cpu else 'has a'} CUDA device, but this vLLM was built for "
                f"{current_platform.device_name or 'no device'}; install laminar[{'cpu' if on_cpu else 'cuda'}]"
            )
        arguments = AsyncEngineArgs(**self._settings(on_cpu))
        with engine_processes_tied_to_this_one():
            # No local variable, no result: vLLM keeps this frame alive (in an exception that it caches), and with it
            # the engine until the interpreter's end, where its destructor fails noisily.
            recorder = step_recorder(self._steps, self._pace, loop)
            self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[recorder])
        if self._closed:
            self._llm.shutdown(0)

    def _settings(self, on_cpu: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model": self.model_folder,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_running,
            "tensor_parallel_size": self.tensor_parallel,
            # The first load brings the weights, checked; reading them here too would double the time to start.
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            # vLLM's default is 0: two rollouts would draw the same samples.
            "seed": secrets.randbelow(2**31),
            "enable_prefix_caching": True,
            # log_softmax(logits / temperature); the default ignores the temperature.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "laminar.workers.engines.vllm_worker.LaminarWorker",
            "disable_log_stats": False,
        }
        kv_cache_mib = self.kv_cache_mib or (CPU_KV_CACHE_MIB if on_cpu else 0)
        if kv_cache_mib:
            settings["kv_cache_memory_bytes"] = kv_cache_mib << 20
        if on_cpu:
            settings |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
        return settings

    async def _probe(self) -> None:
        """An engine that returns no logprobs is found here, not as NaN in a batch."""
        params = self._parameters(PROBE_TOKENS, 1.0, [], None)
        async for output in self._llm.generate({"prompt_token_ids": [0], "cache_salt": "probe"}, params, "probe"):
            chunk_of("probe", output)

    async def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._version, self._digest = -1, ""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown, CLOSE_GRACE_S)
            del llm
            gc.collect()
            # vLLM's own shutdown kills what does not end; this is for what it has already lost sight of.
            kill_left(self._processes)
        self._sockets.close()

    async def check(self) -> None:
        if self._llm is None:
            raise EngineError("the vLLM engine is not running: it was not started, or was closed")
        if self._broken:
            raise EngineError(self._broken)
        if self._llm.errored:
            raise EngineError(f"the vLLM engine process {self.process_id} has died; its log above has the cause")
        now = asyncio.get_running_loop().time()
        oldest = min((live.since for live in self._live.values()), default=now)
        quiet = now - max(oldest, self._steps.get("at", 0.0))
        if self._live and not self._load_lock.locked() and quiet > STALL_S:
            raise EngineError(
                f"the vLLM engine process {self.process_id} has made no step for {quiet:.0f} s though "
                f"{len(self._live)} requests run (limit {STALL_S:.0f} s)"
            )

    # -- weights ------------------------------------------------------------------------------------------------

    async def load(self, source: WeightSource) -> None:
        await self.check()
        # The engine process goes on with a load that nobody waits for any more: a cancelled caller must not leave
        # `version` and `digest` naming other weights than those that are served.
        await asyncio.shield(asyncio.ensure_future(self._load(source)))

    async def _load(self, source: WeightSource) -> None:
        async with self._load_lock:
            self._ready.clear()
            payload = asdict(source) | {"kind": "relay" if isinstance(source, RelayWeights) else "folder"}
            try:
                async with asyncio.timeout(LOAD_DEADLINE_S):
                    arguments = (payload, self.dtype, self.chunk_bytes)
                    results = await self._llm.collective_rpc("laminar_load", args=arguments)
            except Exception as e:
                self._broken = (
                    f"loading version {source.version} into vLLM got no answer (limit {LOAD_DEADLINE_S:.0f} s): "
                    f"{type(e).__name__}: {e}; what the engine serves is unknown, restart it"
                )
                raise EngineError(self._broken) from e
            result = of_all_ranks(results)
            if result["outcome"] == "broken":
                self._broken = (
                    f"loading version {source.version} failed half-way: {result['error']}; the engine holds no version "
                    "any more, restart it"
                )
                raise EngineError(self._broken)
            if result["outcome"] == "loaded":
                self._version, self._digest = source.version, source.digest
                self._loads += 1
                # Frees what no salt can reach any more; refused while requests run, then eviction does it later.
                await self._llm.reset_prefix_cache()
            if self._version >= 0:
                self._ready.set()
            if result["outcome"] == "refused":
                raise WeightsError(result["error"])

    async def settled(self) -> None:
        async with self._load_lock:
            return

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
    ) -> AsyncIterator[Chunk]:
        await self.check()
        if self._model is None or self._version < 0:
            raise EngineError(f"request {request_id} came before the first load: the engine holds no version")
        if request_id in self._live:
            raise EngineError(f"request {request_id} is running already; ids must be unique")
        budget = token_budget(
            request_id,
            token_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            max_model_len=self.max_model_len,
            vocabulary=self._model.vocabulary,
        )
        params = self._parameters(budget, temperature, stop_token_ids, seed)
        live = self._live[request_id] = _Live(asyncio.get_running_loop().time())
        try:
            async for chunk in self._stream(request_id, live, list(token_ids), params):
                yield chunk
        finally:
            self._live.pop(request_id, None)

    async def _stream(self, request_id: str, live: _Live, token_ids: list[int], params: Any) -> AsyncIterator[Chunk]:
        from vllm.exceptions import VLLMClientError, VLLMServerError

        async with asyncio.timeout(LOAD_DEADLINE_S):
            await self._ready.wait()
        if live.aborted:
            yield Chunk([], [], "abort")
            return
        await self.check()
        prompt = {"prompt_token_ids": token_ids, "cache_salt": f"v{self._version}.{self._loads}"}
        stream = self._llm.generate(prompt, params, request_id)
        try:
            async for output in stream:
                chunk = chunk_of(request_id, output)
                if live.aborted and chunk.finish_reason is None:
                    chunk = replace(chunk, finish_reason="abort")
                yield chunk
                if chunk.finish_reason is not None:
                    return
        except (VLLMServerError, VLLMClientError, ValueError) as e:
            raise EngineError(f"request {request_id} failed in vLLM: {type(e).__name__}: {e}") from e
        finally:
            # Closing the stream of a request that still runs aborts it in the engine process too.
            await stream.aclose()
        raise EngineError(f"request {request_id} ended in vLLM without a finish reason")

    def _parameters(self, budget: int, temperature: float, stop_token_ids: Iterable[int], seed: int | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=temperature,
            max_tokens=budget,
            stop_token_ids=list(stop_token_ids),
            # Only the caller's stop tokens stop: the model's own eos may be one that a template writes between turns.
            ignore_eos=True,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    async def abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is None or self._llm is None:
            return
        # Before the request has reached vLLM its abort finds nothing: the mark ends it at its first output.
        live.aborted = True
        await self._llm.abort(request_id)

    def load_report(self) -> EngineLoad:
        if not self._live:
            # The last step's figures stay as they were when the last request is aborted.
            return self._load_of(0, 0, 0)
        running = min(int(self._steps.get("running", 0)), len(self._live))
        # Not simply the rest: a request that the scheduler has lost waits for nothing.
        new = sum(live.since > self._steps.get("at", 0.0) for live in self._live.values())
        waiting = min(int(self._steps.get("waiting", 0)) + new, len(self._live) - running)
        used = round(self._steps.get("kv_usage", 0.0) * self._capacity.kv_tokens)
        return self._load_of(running, waiting, used)

    def _load_of(self, running: int, waiting: int, used: int) -> EngineLoad:
        pace = self._pace
        return EngineLoad(running, waiting, used, pace.batch_limit, pace.step_s, pace.prefill_tokens_per_s)
