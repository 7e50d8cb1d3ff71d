"""A small reference engine: Hugging Face's model code, continuous batching, one thread. For tests and debugging.

    generate() -> waiting -> admitted between two steps -> one token a step -> Chunk -> the caller's queue

All running requests are one left-padded batch with one KV cache. A request that ends is cut out of the cache; one that
comes, and new weights, make the cache be filled again from the token ids, so no cache entry survives the weights that
wrote it. That is quadratic in the number of arrivals: simple and right, not fast.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from laminar.errors import EngineError
from laminar.workers.engines.base import Chunk, EngineCapacity, EngineFinish, EngineLoad, WeightSource
from laminar.workers.engines.pace import Pace
from laminar.workers.engines.requests import finite, token_budget
from laminar.workers.engines.weights import ModelTensors, opened

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(eq=False)
class Request:
    """`tokens`: prompt and what was generated. `chunks` ends with a finish reason or an error."""

    id: str
    tokens: list[int]
    budget: int
    temperature: float
    stops: frozenset[int]
    generator: torch.Generator
    chunks: asyncio.Queue[Chunk | EngineError] = field(default_factory=asyncio.Queue)
    done: bool = False

    def end(self, last: Chunk | EngineError) -> None:
        if not self.done:
            self.done = True
            self.chunks.put_nowait(last)


class TransformersEngine:
    """Engine (see `base.Engine`) in this process; on CUDA if there is a device, else on `threads` CPU threads."""

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: str,
        max_running: int,
        max_model_len: int,
        threads: int = 1,
        chunk_bytes: int = 16 << 20,
    ) -> None:
        self.model_folder = Path(model_folder)
        self.dtype = dtype
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.threads = threads
        self.chunk_bytes = chunk_bytes
        self._version = -1
        self._digest = ""
        self._failure: EngineError | None = None
        self._description: ModelTensors | None = None
        self._batch: Batch | None = None
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._wake = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._pace = Pace(max_running)

    @property
    def version(self) -> int:
        return self._version

    @property
    def digest(self) -> str:
        return self._digest

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> EngineCapacity:
        try:
            description, batch = await asyncio.to_thread(self._build)
            # An engine that gives no finite logprobs is found here, not as NaN in a batch.
            probe = Request("probe", [0], 1, 1.0, frozenset(), torch.Generator(batch.device))
            [(token, logprob)] = await asyncio.to_thread(batch.step, [probe])
        except Exception as e:  # whatever torch and transformers raise
            raise EngineError(
                f"cannot start the transformers engine with model {self.model_folder} (dtype {self.dtype}): {e}"
            ) from e
        finite("probe", [token], [logprob])
        batch.forget()
        self._description, self._batch = description, batch
        self._serving = asyncio.create_task(self._serve(batch), name="transformers-engine")
        return EngineCapacity(self.max_running, self.max_model_len, self.max_running * self.max_model_len)

    def _build(self) -> tuple[ModelTensors, Batch]:
        from transformers import AutoModelForCausalLM

        description = ModelTensors.of_folder(self.model_folder, self.dtype)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(self.threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.model_folder, dtype=description.dtype, local_files_only=True
        )
        description.check_names({name: tuple(t.shape) for name, t in model.state_dict().items()}, "the model's class")
        return description, Batch(model.to(device).eval(), device)

    async def close(self) -> None:
        await self.settled()
        self._version, self._digest = -1, ""
        if self._serving is None:
            return
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._serving = None
        self._end_all(EngineError("the transformers engine was closed while the request ran"))

    async def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._serving is None:
            raise EngineError("the transformers engine is not running: it was not started, or was closed")

    # -- weights ------------------------------------------------------------------------------------------------

    async def load(self, source: WeightSource) -> None:
        await self.check()
        # A cancelled caller must not leave `version` and `digest` naming other weights than those that are served.
        await asyncio.shield(asyncio.ensure_future(self._load(source)))

    async def _load(self, source: WeightSource) -> None:
        await self._exclusively(lambda: self._replace_weights(source))
        self._version, self._digest = source.version, source.digest

    async def settled(self) -> None:
        async with self._between_steps:
            return

    def _replace_weights(self, source: WeightSource) -> None:
        assert self._description is not None and self._batch is not None
        with opened(source, self._description, chunk_bytes=self.chunk_bytes) as tensors:
            self._batch.replace_weights({name: tensors[name] for name in self._description.shapes})

    async def _exclusively(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, alone. A cancelled caller waits for its end: never two threads in the model."""
        async with self._between_steps:
            running = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise

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
        if self._version < 0 or self._description is None or self._batch is None:
            raise EngineError(f"request {request_id} came before the first load: the engine holds no version")
        if request_id in self._requests:
            raise EngineError(f"request {request_id} is running already; ids must be unique")
        budget = token_budget(
            request_id,
            token_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            max_model_len=self.max_model_len,
            vocabulary=self._description.vocabulary,
        )
        generator = torch.Generator(self._batch.device)
        generator.manual_seed(secrets.randbits(63) if seed is None else seed)
        request = Request(request_id, list(token_ids), budget, temperature, frozenset(stop_token_ids), generator)
        self._requests[request_id] = request
        self._waiting.append(request)
        self._wake.set()
        try:
            while True:
                chunk = await request.chunks.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            # Also reached when the caller stops iterating: the next step then leaves the request out.
            request.done = True
            self._requests.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.end(Chunk([], [], "abort"))

    def load_report(self) -> EngineLoad:
        running = [r for r in self._running if not r.done]
        waiting = sum(not r.done for r in self._waiting)
        pace = self._pace
        return EngineLoad(
            len(running), waiting, sum(len(r.tokens) for r in running), pace.batch_limit, pace.step_s,
            pace.prefill_tokens_per_s,
        )  # fmt: skip

    async def _serve(self, batch: Batch) -> None:
        try:
            while True:
                self._admit()
                if not self._running:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                requests = list(self._running)
                began = asyncio.get_running_loop().time()
                drawn = await self._exclusively(partial(batch.step, requests))
                self._pace.step(len(requests), batch.prefilled, asyncio.get_running_loop().time() - began)
                for request, (token, logprob) in zip(requests, drawn, strict=True):
                    self._deliver(request, token, logprob)
        except Exception as e:  # whatever torch raises: out of memory, a broken kernel
            log.exception("the transformers engine failed")
            self._failure = EngineError(f"the transformers engine failed in a step: {type(e).__name__}: {e}")
            self._failure.__cause__ = e
            self._end_all(self._failure)

    def _admit(self) -> None:
        self._running = [r for r in self._running if not r.done]
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting.popleft()
            if not request.done:
                self._running.append(request)

    def _deliver(self, request: Request, token: int, logprob: float) -> None:
        if request.done:
            return
        try:
            finite(request.id, [token], [logprob])
        except EngineError as e:
            request.end(e)
            return
        request.tokens.append(token)
        request.budget -= 1
        finish: EngineFinish | None = "stop" if token in request.stops else "length" if request.budget == 0 else None
        chunk = Chunk([token], [logprob], finish)
        if finish is None:
            request.chunks.put_nowait(chunk)
        else:
            request.end(chunk)

    def _end_all(self, error: EngineError) -> None:
        for request in self._requests.values():
            request.end(error)
        self._running.clear()
        self._waiting.clear()


class Batch:
    """The model and the KV cache of the requests that ran in the last step. Used by one thread at a time."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.prefilled = 0
        """Tokens that the last step filled the cache with, again or for the first time."""
        self._members: list[Request] = []
        self._cache: Any = None
        self._mask = torch.empty(0)

    def forget(self) -> None:
        self._members, self._cache = [], None

    @torch.no_grad()
    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies; names and shapes were checked, so that nothing can fail half-way."""
        state = self.model.state_dict()
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
        self.forget()

    @torch.inference_mode()
    def step(self, requests: list[Request]) -> list[tuple[int, float]]:
        """One token and its logprob for each request, whose `tokens` the caller then extends."""
        kept = [index for index, member in enumerate(self._members) if member in requests]
        if self._cache is not None and [self._members[index] for index in kept] == requests:
            self.prefilled = 0
            logits = self._decode(requests, kept)
        else:
            self.prefilled = sum(len(request.tokens) for request in requests)
            logits = self._prefill(requests)
        self._members = requests
        return [self._sample(request, row) for request, row in zip(requests, logits.float(), strict=True)]

    def _prefill(self, requests: list[Request]) -> torch.Tensor:
        """Fill the cache from all tokens; logits [requests, vocabulary] of the next token."""
        width = max(len(request.tokens) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros(len(requests), width, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - len(request.tokens) :] = torch.tensor(request.tokens)
            mask[row, width - len(request.tokens) :] = 1
        self._mask = mask.to(self.device)
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(ids.to(self.device), positions, None)

    def _decode(self, requests: list[Request], kept: list[int]) -> torch.Tensor:
        """Add the last token of each request to the cache, from which members that have left are cut out."""
        if len(kept) < len(self._members):
            rows = torch.tensor(kept, device=self.device)
            self._cache.batch_select_indices(rows)
            self._mask = self._mask[rows]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(requests), 1)], 1)
        ids = torch.tensor([[request.tokens[-1]] for request in requests], device=self.device)
        return self._forward(ids, self._mask.sum(1, keepdim=True) - 1, self._cache)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _sample(self, request: Request, logits: torch.Tensor) -> tuple[int, float]:
        """Draw from log_softmax(logits / temperature), logits [vocabulary] float32; greedy at temperature 0."""
        logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        if not bool(torch.isfinite(logprobs.max())):
            return 0, float("nan")  # `finite` names the request; multinomial would end the step for all
        if request.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=request.generator))
        return token, float(logprobs[token])
