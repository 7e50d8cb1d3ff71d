"""The fluid engine behind the workers' own interface, with a learner and scoring that take the time of the cost models.

A simulated token stands for `grain` real ones: a trajectory of thousands of tokens is a row of a few dozen, which the
workers log, hand over, commit and train on as they would any other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from laminar.errors import WeightsError
from laminar.relay.layout import verify
from laminar.relay.writing import Invitation
from laminar.simulator.learner import SimLearner
from laminar.simulator.loop import THREAD_S, SimulationLoop
from laminar.simulator.process import SimProcess
from laminar.simulator.relays import CHUNK_BYTES, SimRelayAccess, SimWeights
from laminar.simulator.scale.engine import Engine, Key, Request
from laminar.simulator.scale.job import Job
from laminar.workers.engines.base import Chunk, EngineCapacity, EngineLoad, RelayWeights, WeightSource
from laminar.workers.environments.base import Message, Prompt, Resume, Score, Transcript, Turn
from laminar.workers.learning.base import Sample, SampleStats, StepResult

TOKENS = 64
"""Simulated tokens of the longest trajectory, about."""
TELL_S = 2.0
"""Between two chunks of a request that still runs."""
LEAST_S = 1e-6
STOP, POLICY, ENVIRONMENT, LAST = 2, 3, 1, 4
"""`LAST` stops the last turn of a trajectory, which may have fewer than `environment.turns`."""
FAREWELL = "!"
"""What `LAST` says to the environment."""
LOGPROB = -0.5


@dataclass(frozen=True)
class Grain:
    """Lengths of trajectories in simulated tokens; `grain` real ones each."""

    job: Job
    grain: int

    @classmethod
    def of(cls, job: Job) -> Grain:
        return cls(job, max(1, job.settings.job.max_tokens // TOKENS))

    @property
    def prompt(self) -> int:
        return max(1, round(self.job.settings.job.prompt_tokens / self.grain))

    def turns(self, key: Key) -> list[int]:
        return [max(1, round(n / self.grain)) for n in self.job.turns_of(key)]

    @property
    def most(self) -> int:
        """Policy tokens of any trajectory; rounding adds one a turn at most."""
        return self.job.settings.job.max_tokens // self.grain + self.job.settings.environment.turns + 1

    @property
    def model_len(self) -> int:
        return self.prompt + self.most + self.job.settings.environment.turns + 1


class CostLoop(SimulationLoop):
    """`busy_s`: set by what runs in a thread to how long it takes; its result is there after that."""

    busy_s = 0.0

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> asyncio.Future[object]:  # type: ignore[override]
        future = self.create_future()
        self.busy_s = 0.0
        outcome: object = None
        error: BaseException | None = None
        try:
            outcome = func(*args)
        except BaseException as e:
            error = e
        seconds = max(self.busy_s, self._source.uniform(*THREAD_S))

        def done() -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(outcome)

        self.call_later(seconds, done)
        return future


class CostEngine:
    """`published_at`: when each version was, in the loop's time; `relay`: the place of its host's relay."""

    def __init__(
        self, process: SimProcess, switchboard: dict[str, SimWeights], grain: Grain, engine: Engine,
        published_at: dict[int, float], relay: int,
    ) -> None:  # fmt: skip
        self.process = process
        self.switchboard = switchboard
        self.grain = grain
        self.job = grain.job
        self.engine = engine
        self.published_at = published_at
        self.relay = relay
        self._version = -1
        self._digest = ""
        self._keys: dict[str, Key] = {}
        self._queues: dict[Key, asyncio.Queue[Chunk]] = {}
        self._told: dict[Key, int] = {}
        self._whole: dict[Key, int] = {}
        self._real: dict[Key, int] = {}
        """Real tokens of the turn, of which `_whole` simulated ones are made."""
        self._stop: dict[Key, int] = {}
        """What the turn ends with."""
        self._cached: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self._tell_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> EngineCapacity:
        self._task = asyncio.create_task(self._run())
        s, g = self.job.settings, self.grain
        tokens = self.job.costs.kv_tokens // g.grain
        return EngineCapacity(max_running=s.rollout.max_running, max_model_len=g.model_len, kv_tokens=tokens)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def version(self) -> int:
        return self._version

    @property
    def digest(self) -> str:
        return self._digest

    async def settled(self) -> None:
        """A load ends with its caller here."""

    async def load(self, source: WeightSource) -> None:
        if not isinstance(source, RelayWeights):
            raise WeightsError(f"version {source.version} lies in a folder, which the simulation does not have")
        info, layout, data = await SimRelayAccess(self.process, source.socket, self.switchboard).read(source.version)
        if info.digest != source.digest:
            raise WeightsError(f"version {source.version} is {info.digest[:12]}, promised was {source.digest[:12]}")
        verify(memoryview(data), layout, CHUNK_BYTES, source.digest)
        now, weights = self.process.loop.now, self.job.costs.weights
        # Who waits for a version asks for it before anybody has looked when it was published: just now, then.
        published = self.published_at.get(source.version, now if source.version else -1e9)
        arrives = published + weights.arrival_s(self.relay)
        await asyncio.sleep(max(0.0, arrives - now) + weights.load_s)
        self._version, self._digest = source.version, source.digest
        self._cached.clear()

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
        group, sample, _, turn, _ = (int(part) for part in request_id.split("-"))
        key, turns = (group, sample), self.grain.turns((group, sample))
        done = len(token_ids) - self.grain.prompt - sum(turns[:turn]) - turn
        whole = turns[turn]
        real, prompt = self.job.turns_of(key), self.job.settings.job.prompt_tokens
        tokens = prompt + sum(real[:turn]) + real[turn] * done / whole
        fresh = len(token_ids) == self.grain.prompt
        shared = prompt / self.job.settings.job.samples_per_prompt
        prefill = 0.0 if self._cached.get(key) == self._version else shared if fresh else tokens
        self.engine.advance(self.process.loop.now)
        if prefill and not fresh:
            self.engine.refilled += tokens
        self._keys[request_id] = key
        self._told[key], self._whole[key], self._real[key] = done, whole, real[turn]
        self._cached[key] = self._version
        self._stop[key] = LAST if turn + 1 == len(turns) else STOP
        queue = self._queues[key] = asyncio.Queue()
        self.engine.submit(Request(key, tokens, real[turn] * (whole - done) / whole, prefill))
        self._changed.set()
        try:
            while True:
                chunk = await queue.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._keys.pop(request_id, None)
            if self._queues.get(key) is queue:
                self._take(key)

    async def abort(self, request_id: str) -> None:
        key = self._keys.get(request_id)
        if key is None or key not in self._queues:
            return
        self.engine.advance(self.process.loop.now)
        tokens, queue = self._new_tokens(key), self._queues[key]
        self._take(key)
        queue.put_nowait(Chunk(tokens, [LOGPROB] * len(tokens), "abort"))

    def load_report(self) -> EngineLoad:
        self.engine.advance(self.process.loop.now)
        grain, costs = self.grain.grain, self.job.costs
        return EngineLoad(
            running=len(self.engine.running), waiting=len(self.engine.waiting), kv_tokens=round(self.engine.kv / grain),
            batch_limit=self.job.batch_limit, step_s=grain * costs.decode.step_s(1, self.job.context),
            prefill_tokens_per_s=costs.prefill_tokens_per_s / grain,
        )  # fmt: skip

    async def check(self) -> None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    # -- the engine's own loop ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = self.process.loop
        while True:
            self._changed.clear()
            if loop.now >= self._tell_at:
                self._tell_at = loop.now + TELL_S
            until = min(self.engine.next_event(), self._tell_at if self.engine.running else float("inf"))
            await self._sleep(until)
            self.engine.advance(loop.now)
            for key in self.engine.settle():
                self._finish(key)
            if loop.now >= self._tell_at:
                for key in list(self.engine.running):
                    tokens = self._new_tokens(key)
                    if tokens:
                        self._queues[key].put_nowait(Chunk(tokens, [LOGPROB] * len(tokens)))

    async def _sleep(self, until: float) -> None:
        """Until then, by the time of the loop, or until something has changed."""
        if until == float("inf"):
            await self._changed.wait()
            return
        try:
            # Never less than that: a process's clock rounds, and time would stand still just before the event.
            async with asyncio.timeout(max(LEAST_S, until - self.process.loop.now) * self.process.rate):
                await self._changed.wait()
        except TimeoutError:
            return

    def _new_tokens(self, key: Key) -> list[int]:
        """Simulated tokens since the last chunk; never the last one of the turn, which only its end brings."""
        request = self.engine.running.get(key) or next((r for r in self.engine.waiting if r.key == key), None)
        if request is None:
            return []
        has = self.engine.tokens_of(request) if key in self.engine.running else request.tokens
        left = request.remaining - (has - request.tokens)
        whole = self._whole[key]
        count = min(whole - 1, int(whole * (1 - left / self._real[key])))
        new = max(0, count - self._told[key])
        self._told[key] += new
        return [POLICY] * new

    def _finish(self, key: Key) -> None:
        rest = max(1, self._whole[key] - self._told[key])
        queue = self._queues.pop(key)
        queue.put_nowait(Chunk([POLICY] * (rest - 1) + [self._stop[key]], [LOGPROB] * rest, "stop"))

    def _take(self, key: Key) -> None:
        self._queues.pop(key, None)
        if key in self.engine.running or any(r.key == key for r in self.engine.waiting):
            self.engine.take(key)
            self._changed.set()


class CostLearner(SimLearner):
    """Takes the time of the cost models. `steps`: what each step trained: groups, ages, seconds."""

    def __init__(
        self, states: dict[int, set[str]], job: Job, gpus: int, loop: CostLoop,
        steps: dict[int, tuple[list[int], Counter[int], float]],
    ) -> None:  # fmt: skip
        super().__init__(states)
        self.job = job
        self.gpus = gpus
        self.loop = loop
        self.steps = steps

    def train(self, batch: Sequence[Sample], fresh: Callable[[], Sequence[Sample]] | None = None) -> StepResult:
        step = self.version
        result = super().train([], fresh)
        groups = list(dict.fromkeys(s.group for s in batch))
        train_s = self.job.train_s(groups, self.gpus)
        self.steps[step] = (groups, Counter(step - s.version for s in batch), train_s)
        self.loop.busy_s = train_s
        stats = [SampleStats(s.group, s.sample, 0.0, len(s.token_ids), 1.0, 0.0, 0.0, LOGPROB) for s in batch]
        return StepResult(stats, result.metrics)

    def write_weights(self, buffer: memoryview, invitation: Invitation | None = None) -> int:
        written = super().write_weights(buffer)
        self.loop.busy_s = self.job.costs.weights.publish_s
        return written


class CostHost:
    """Environments and rewards that take the time of the job's; a reward is the number of tokens, so that groups have
    something to learn from."""

    resume: Resume = "state"

    def __init__(self, job: Job) -> None:
        self.job = job
        self._calls = 0

    async def reset(self, prompt: Prompt) -> Turn:
        return Turn([{"role": "user", "content": prompt.prompt}], state="0")

    async def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
        self._calls += 1
        await asyncio.sleep(self.job.acting_s((self._calls, len(reply)), int(state)))
        done = reply.endswith(FAREWELL)
        return Turn([{"role": "tool", "content": "again"}], state=str(int(state) + 1), done=done)

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        await asyncio.sleep(self.job.settings.environment.reward_s)
        return Score(float(transcript.tokens), {})

    async def close(self) -> None:
        pass


class CostConversation:
    """Texts are as long as their tokens; what they say does not matter."""

    def __init__(self, grain: Grain) -> None:
        self.grain = grain

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return [ENVIRONMENT] * self.grain.prompt

    def turn_ids(self, messages: Sequence[Message], reply_ids: Sequence[int] | None = None) -> list[int]:
        return [ENVIRONMENT]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(FAREWELL if id == LAST else "." for id in ids)
