"""What a rollout needs of an inference engine. Implementations pass `tests/contract/test_engine.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

EngineFinish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class RelayWeights:
    """Version `version` as a local relay serves it over the Unix socket at `socket`."""

    socket: str
    version: int
    digest: str


@dataclass(frozen=True)
class FolderWeights:
    """Weights in a Hugging Face folder: the initial model, or a checkpoint's export."""

    path: str
    version: int
    digest: str


WeightSource = RelayWeights | FolderWeights


@dataclass(frozen=True)
class Chunk:
    """Newly generated tokens of one request: `token_ids` and `logprobs` have the same length.

    Logprobs are of the distribution that was sampled from: log_softmax(logits / temperature), in nats, finite.
    `finish_reason` is None while the request runs; the last chunk may be empty of tokens. A stop token is
    part of `token_ids`.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: EngineFinish | None = None


@dataclass(frozen=True)
class EngineCapacity:
    max_running: int
    max_model_len: int
    kv_tokens: int


@dataclass(frozen=True)
class EngineLoad:
    """Now, in trajectories and tokens. `batch_limit`, `step_s` and `prefill_tokens_per_s` as in `pace.Pace`, measured
    in the engine's own steps; 0 where they are not known (yet)."""

    running: int
    waiting: int
    kv_tokens: int
    batch_limit: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


class Engine(Protocol):
    """One engine holds one version at a time. All methods raise EngineError with the cause."""

    async def start(self) -> EngineCapacity: ...

    async def close(self) -> None:
        """Ends the engine and any process of it, within seconds."""
        ...

    async def load(self, source: WeightSource) -> None:
        """Replace the weights atomically between two decode steps; on an error the old version stays. What was begun
        goes on though its caller is cancelled: see `settled`.

        Raises WeightsError when the bytes do not match the digest, the layout or the model.
        """
        ...

    async def settled(self) -> None:
        """Wait for a load whose caller was cancelled: as long as it lasts, `version` and `digest` may yet change."""
        ...

    @property
    def version(self) -> int:
        """The version loaded and verified; -1 before the first load."""
        ...

    @property
    def digest(self) -> str:
        """Of the version loaded, as its source named it; the two change together. Empty before the first load."""
        ...

    def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
    ) -> AsyncIterator[Chunk]:
        """Stream chunks as they are decoded. The prefix cache never crosses versions. temperature 0 is greedy."""
        ...

    async def abort(self, request_id: str) -> None:
        """The request's iterator ends with finish_reason 'abort'; unknown ids are ignored."""
        ...

    def load_report(self) -> EngineLoad: ...

    async def check(self) -> None:
        """Raise EngineError if the engine is dead."""
        ...
