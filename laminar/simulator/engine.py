"""A simulated engine, whose tokens tell on whoever loses, doubles or mislabels them.

A token's id follows from its place in the sequence, and its logprob from the digest of the weights that wrote it: an
oracle can read off a committed row whether it is one contiguous sequence and whether its spans speak the truth.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

from laminar.errors import EngineError, WeightsError
from laminar.relay.layout import verify
from laminar.simulator.process import SimProcess
from laminar.simulator.relays import CHUNK_BYTES, SimRelayAccess, SimWeights
from laminar.workers.engines.base import Chunk, EngineCapacity, EngineLoad, RelayWeights, WeightSource

CUT_TOKEN, STOP_TOKEN = 0, 2
"""The last of a turn that the engine ends with "length" before its limit, and the last of one that stops."""
FIRST_TOKEN, VOCABULARY = 3, 97


def token_at(place: int) -> int:
    """The id of the policy's token at `place`, counted from the first token of the prompt; at the end of a turn
    STOP_TOKEN or CUT_TOKEN may stand in."""
    return FIRST_TOKEN + place % VOCABULARY


def logprob_of(digest: str) -> float:
    """What weights of `digest` (at least 5 hexadecimal digits) give each of their tokens; exact in float32."""
    return -(int(digest[:5], 16) + 1) / (1 << 20)


class SimEngine:
    """`step_s`: range of a decode step's duration; `mean_tokens`: of a turn; `long`: the share of turns that take half
    of what they may, or more. Set `failing` to break it."""

    def __init__(
        self,
        process: SimProcess,
        switchboard: dict[str, SimWeights],
        source: random.Random,
        *,
        capacity: EngineCapacity,
        step_s: tuple[float, float],
        mean_tokens: float,
        long: float = 0.0,
    ) -> None:
        self.process = process
        self.switchboard = switchboard
        self.source = source
        self.capacity = capacity
        self.step_s = step_s
        self.mean_tokens = mean_tokens
        self.long = long
        self.failing = False
        self._version = -1
        self._digest = ""
        self._loading = asyncio.Lock()
        self._running: dict[str, int] = {}
        self._aborted: set[str] = set()

    async def start(self) -> EngineCapacity:
        await asyncio.sleep(self.source.uniform(0.2, 1.0))
        return self.capacity

    async def close(self) -> None:
        self._running.clear()

    async def load(self, source: WeightSource) -> None:
        # As with the real engines, a load goes on though nobody waits for it any more.
        await asyncio.shield(asyncio.create_task(self._load(source)))

    async def _load(self, source: WeightSource) -> None:
        async with self._loading:
            await self._replace_weights(source)

    async def _replace_weights(self, source: WeightSource) -> None:
        if not isinstance(source, RelayWeights):
            raise WeightsError(f"version {source.version} lies in a folder, which the simulation does not have")
        info, layout, data = await SimRelayAccess(self.process, source.socket, self.switchboard).read(source.version)
        if info.digest != source.digest:
            raise WeightsError(f"version {source.version} is {info.digest[:12]}, promised was {source.digest[:12]}")
        verify(memoryview(data), layout, CHUNK_BYTES, source.digest)
        chance = self.source.random()
        # Large weights take seconds, in which a lease can be lost.
        await asyncio.sleep(0.01 + 0.1 * chance if chance < 0.9 else 30 * (chance - 0.85))
        self._version, self._digest = source.version, source.digest

    @property
    def version(self) -> int:
        return self._version

    @property
    def digest(self) -> str:
        return self._digest

    async def settled(self) -> None:
        async with self._loading:
            return

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
        place = len(token_ids)
        length = min(max_tokens, 1 + int(self.source.expovariate(1 / self.mean_tokens)))
        if self.source.random() < self.long:
            length = max(length, int(max_tokens * self.source.uniform(0.5, 1.0)))
        stops = self.source.random() < 0.9
        end = STOP_TOKEN if stops else CUT_TOKEN if length < max_tokens else None
        self._running[request_id] = place
        try:
            while length:
                await asyncio.sleep(self.source.uniform(*self.step_s))
                await self.check()
                if request_id in self._aborted:
                    yield Chunk([], [], "abort")
                    return
                count = min(length, self.source.randint(1, 4))
                ids = [token_at(place + i) for i in range(count)]
                length -= count
                place += count
                self._running[request_id] = place
                if not length and end is not None:
                    ids[-1] = end
                reason = None if length else "stop" if stops else "length"
                yield Chunk(ids, [logprob_of(self._digest)] * count, reason)  # type: ignore[arg-type]
        finally:
            self._running.pop(request_id, None)
            self._aborted.discard(request_id)

    @property
    def requests(self) -> list[str]:
        """Ids of those that are being generated."""
        return list(self._running)

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._aborted.add(request_id)

    def load_report(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running), waiting=0, kv_tokens=sum(self._running.values()),
            batch_limit=self.capacity.max_running, step_s=sum(self.step_s) / 5, prefill_tokens_per_s=1000.0,
        )  # fmt: skip

    async def check(self) -> None:
        if self.failing:
            raise EngineError("the simulated engine was broken by a fault")
