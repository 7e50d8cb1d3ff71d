"""What streaming partial responses to the store costs: generation throughput with it, beside the same without it.

    python benchmarks/streaming.py                                                 # tiny model, transformers engine
    python benchmarks/streaming.py --config examples/quickstart.toml --rounds 6    # vLLM, 135 M parameters

One engine, one process, one start: the rollout's own parts (engine, generation, flusher, partial log, scoring process)
run the same prompts again and again, streaming on and off by turns, so that a busy or slowing machine hits both alike.
Each round has the same lengths, spread evenly from half of `--max-tokens` to all of it (nothing stops a trajectory
earlier): of equal lengths all would end at once, and the engine would idle while they wait for one flush. At most
`rollout.max_running` run at once; the tiny model's rounds have no more than that. Those that wait would join the batch
of the `transformers` engine, which makes its cache anew whenever some come: with streaming on they come together, after
a flush, so that rounds of 256 at 128 tell how often they came (on / off 1.3, at a third of the speed). Off is
`rollout.partials = false`: no row reaches the log and nobody waits for it. On, rows go out every
`rollout.flush_interval` seconds and at each end of generation, with one fsync a flush (`rollout.fsync`). After each
round with streaming on, untimed, the log is read back: every token must be there.

Not in it: finished rows, claims and weights, which cost the same either way.
Prints tokens a second of each pair of rounds, the medians, and the median ratio on / off (1.00: streaming is free).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import Compare, KeyValue, absent
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.memory import MemoryCoordination
from laminar.buffer.memory_server import MemoryEtcd
from laminar.buffer.partials import PartialLog, assemble, read_partials
from laminar.buffer.storage import Storage, open_storage
from laminar.clock import SystemClock
from laminar.config import Config, load_config_with
from laminar.workers.engines import create_engine
from laminar.workers.engines.base import Engine, FolderWeights
from laminar.workers.environments.base import Prompt
from laminar.workers.environments.host import EnvironmentHost
from laminar.workers.environments.sources import load_prompts
from laminar.workers.models import resolve_model
from laminar.workers.pools import prompt_of
from laminar.workers.rollouts.conversation import Conversation, load_tokenizer
from laminar.workers.rollouts.generation import Generation, Where
from laminar.workers.rollouts.outbox import Flusher
from laminar.workers.rollouts.trajectory import Trajectory

HERE = Path(__file__).resolve().parent
LENGTHS = 8
PROMPT_ROOM = 64
"""Tokens beside the response that a trajectory may have at least."""


class Alone:
    """The ledger's actor: no claim changes hands here, so its guard is never compared."""

    def guard(self) -> Compare:
        return absent("nobody")


@dataclass(frozen=True)
class Bench:
    config: Config
    engine: Engine
    host: EnvironmentHost
    conversation: Conversation
    prompts: list[Prompt]
    storage: Storage
    ledger: Ledger
    running: int

    async def round(self, name: str, *, streaming: bool) -> tuple[float, int]:
        """Tokens a second, and flushes."""
        clock = SystemClock()
        live: dict[tuple[int, int], Trajectory] = {}
        flusher = Flusher(
            PartialLog(self.storage, name, sync=self.config.rollout.fsync),
            live.values,
            clock,
            interval_s=self.config.flush_interval,
            enabled=streaming,
        )
        generations = [
            Generation(config, self.engine, self.host, self.conversation, self.ledger, flusher, clock, [])
            for config in of_lengths(self.config)
        ]
        room = asyncio.Semaphore(self.running)
        ended: list[Trajectory] = []

        async def generate(number: int, prompt: Prompt) -> None:
            claim = claims.drawn(name, self.engine.version)
            held = Held(claim, KeyValue(self.ledger.keys.claim(number, 0), claim.dump(), 1, 1))
            async with room:
                t = Trajectory(held, name, self.engine.version, "", clock.now_us())
                live[t.id] = t
                await generations[number % LENGTHS].run(t, Where(0, number, prompt))
                del live[t.id]
                ended.append(t)

        flushing = asyncio.create_task(flusher.run())
        before = time.perf_counter()
        await asyncio.gather(*(generate(i, p) for i, p in enumerate(self.prompts)))
        took = time.perf_counter() - before
        flushing.cancel()
        with suppress(asyncio.CancelledError):
            await flushing
        if streaming:
            await self.check(name, ended)
        return sum(t.policy_tokens for t in ended) / took, flusher.flushes

    async def check(self, name: str, ended: list[Trajectory]) -> None:
        """Every token that was generated stands in the log."""
        rows = (await read_partials(self.storage, name)).rows
        for t in ended:
            kept = assemble(rows.get((*t.id, t.held.claim.term), []))
            if kept.token_ids != t.token_ids:
                raise RuntimeError(f"{t.name}: {len(kept.token_ids)} of {len(t.token_ids)} tokens are in the log")


def of_lengths(config: Config) -> list[Config]:
    """The config with each of the lengths that a round mixes."""
    longest = config.sampling.max_tokens
    lengths = [longest - i * (longest // 2) // (LENGTHS - 1) for i in range(LENGTHS)]
    return [
        config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_tokens": n})}) for n in lengths
    ]


async def measure(config: Config, options: argparse.Namespace, folder: Path) -> None:
    model = resolve_model(config.model.path)
    rows = load_prompts(config.prompts, config.evaluation).train
    prompts = [prompt_of({**rows[i % len(rows)], "prompt_index": i}) for i in range(options.trajectories)]
    host = EnvironmentHost(config.environment, config.reward, workers=config.reward.workers)
    engine = create_engine(config, model)
    await host.start()
    try:
        capacity = await engine.start()
        await engine.load(FolderWeights(str(model), 0, ""))
        bench = Bench(
            config=config,
            engine=engine,
            host=host,
            conversation=Conversation(load_tokenizer(model), config.sampling.chat_template_options),
            prompts=prompts,
            storage=open_storage(str(folder)),
            ledger=Ledger(MemoryCoordination(MemoryEtcd()), Keys("benchmark"), "benchmark", Alone()),
            running=min(config.rollout.max_running, capacity.max_running),
        )
        await compare(bench, options.rounds)
    finally:
        await host.close()
        await engine.close()


async def compare(bench: Bench, rounds: int) -> None:
    c = bench.config
    fsync = " with fsync" if c.rollout.fsync else ""
    print(
        f"{c.model.path} on {c.rollout.engine}, {len(bench.prompts)} trajectories of up to {c.sampling.max_tokens} "
        f"tokens, {bench.running} at once, a flush every {c.flush_interval} s{fsync}"
    )
    await bench.round("warm-up-on", streaming=True)
    await bench.round("warm-up-off", streaming=False)
    on: list[float] = []
    off: list[float] = []
    flushes = 0
    for n in range(rounds):
        # On first, then off first: what a round leaves behind does not always meet the same one.
        for streaming in (True, False) if n % 2 == 0 else (False, True):
            rate, count = await bench.round(f"round-{n}-{'on' if streaming else 'off'}", streaming=streaming)
            (on if streaming else off).append(rate)
            flushes += count
        print(f"round {n}: on {on[-1]:8.1f}  off {off[-1]:8.1f} tokens/s  ratio {on[-1] / off[-1]:.3f}", flush=True)
    ratios = sorted(a / b for a, b in zip(on, off, strict=True))
    print(
        f"median: on {statistics.median(on):8.1f}  off {statistics.median(off):8.1f} tokens/s  "
        f"ratio {statistics.median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f}), "
        f"{flushes / rounds:.1f} flushes a round"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=HERE.parent / "examples" / "tiny.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--trajectories", type=int, default=128, help="trajectories of a round")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of the longest (the tiny model: at most 64)")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of rounds")
    options = parser.parse_args()
    config, _ = load_config_with(options.config, options.set)
    length = max(config.rollout.max_model_len, options.max_tokens + PROMPT_ROOM)
    sizes = [f"sampling.max_tokens={options.max_tokens}", f"rollout.max_model_len={length}"]
    config, _ = load_config_with(options.config, [*options.set, *sizes])
    with tempfile.TemporaryDirectory(prefix="streaming-benchmark-") as folder:
        asyncio.run(measure(config, options, Path(folder)))


if __name__ == "__main__":
    main()
