"""What the buffer costs: rows to a reader beside a queue in memory, streaming on a core, recovery after a death.

    python benchmarks/buffer.py                     # all three parts
    python benchmarks/buffer.py --parts finish      # or stream, or recover, or several with commas

1. finish   Finished trajectories go the way they go in a run: a segment is written and fsynced, registered in a real
            etcd (one transaction, which ends their claims), committed to Lance with fsync by the elected committer,
            seen by a reader, read whole. Beside it the same rows through transferqueue, which keeps them in memory.
            Both begin with Python lists, as an engine gives them, and end with columns in the reader's own memory.
2. stream   Trajectories take tokens at a fixed rate, flushed every 0.5 s: CPU time of the process over wall time, with
            fsync and without, less what merely keeping the tokens in memory takes.
3. recover  The log of a rollout that died is read, checked and put together again.

What differs in 1, on purpose: a row of Laminar's that is visible survives the death of every process and a power cut;
one of transferqueue's dies with its storage process. Its rows have equal lengths here, its fastest case. Laminar also
waits, 20 ms for others that finish and up to 0.2 s for others to commit with: those waits are in its times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import partials
from transferqueue_baseline import sample_rows

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.experience import Finished
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile, write_run
from laminar.buffer.partials import Partial, Span
from laminar.buffer.records import RunManifest
from laminar.buffer.storage import LocalStorage
from laminar.buffer.table import Table
from laminar.clock import SystemClock
from laminar.config import load_config_with
from laminar.workers.committer import committer_main
from laminar.workers.context import Member, Run, joined, open_run
from laminar.workers.mirror import Mirror
from laminar.workers.rollouts.outbox import Done, Finisher
from laminar.workers.supervisor.etcd_process import EtcdProcess
from laminar.workers.tables import open_table
from laminar.workers.tasks import until_first

HERE = Path(__file__).resolve().parent
TQ_VENV = HERE.parent / ".venv-tq"
TQ_PACKAGES = ("transferqueue==0.1.11", "ray==2.60.0")
TQ_DEADLINE_S = 600.0
VISIBLE_DEADLINE_S = 120.0
SAMPLES = 8
BYTES_A_TOKEN = 8
"""An int32 token and a float32 logprob; masks and columns of a few bytes a row are not counted."""

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    tokens: int
    repeats: int

    @property
    def megabytes(self) -> float:
        return self.rows * self.tokens * BYTES_A_TOKEN / 1e6


@dataclass
class World:
    """A rollout's way out and the trainer's way in, on one store and one etcd."""

    member: Member
    table: Table
    head: Mirror
    finisher: Finisher
    ended: list[float]
    scanned: int = -1

    async def draw(self, rows: int) -> list[Held]:
        held: list[Held] = []
        while len(held) < rows:
            size = claims.draw_size(rows - len(held), rows, SAMPLES)
            held += await self.member.ledger.draw(groups=lambda _, n=size: n, samples_per_prompt=SAMPLES, version=0)
        return held

    async def finish(self, finished: Sequence[Finished], held: Sequence[Held]) -> dict[str, float]:
        """Seconds from the first row's finish until all are registered, visible, and read."""
        self.ended.clear()
        began = time.perf_counter()
        for f, h in zip(finished, held, strict=True):
            self.finisher.put(Done(h, f))
        seen = 0
        while seen < len(finished):
            before = self.head.only  # ahead of the look: what is committed during it must not be waited for
            rows = await self.table.scan_since(self.scanned, ["group", "sample", "status", "reward"])
            if rows.num_rows:
                self.scanned = max(rows["commit_seq"].to_pylist())
                seen += rows.num_rows
                continue
            if not await self.head.wait_for(lambda b=before: self.head.only != b, VISIBLE_DEADLINE_S):
                raise RuntimeError(f"{seen} of {len(finished)} rows were visible after {VISIBLE_DEADLINE_S:g} s")
        visible = time.perf_counter()
        groups = ", ".join(str(g) for g in sorted({h.id[0] for h in held}))
        read = await self.table.read(filter=f"group IN ({groups})")
        done = time.perf_counter()
        if read.num_rows != len(finished):
            raise RuntimeError(f"{read.num_rows} of {len(finished)} rows were read")
        return {"registered": max(self.ended) - began, "visible": visible - began, "read": done - began}


async def measure_finish(cases: Sequence[Case], folder: Path, seed: int) -> dict[str, Times]:
    """Everything is real: etcd, leases, election, committer, files. The committer shares this process, though."""
    etcd = EtcdProcess(folder / "etcd")
    await etcd.start()
    coordination = EtcdCoordination([etcd.endpoint])
    run = await new_run(coordination, folder / "store")
    times: dict[str, Times] = {}
    try:
        async with (
            joined(run, "rollout") as rollout,
            joined(run, "committer") as committer,
            Mirror(coordination, run.keys.head("experience"), exact=True) as head,
        ):
            ended: list[float] = []
            finisher = Finisher(run.storage, rollout.ledger, run.clock, lambda _: ended.append(time.perf_counter()))
            w = World(rollout, open_table(run.storage, "experience"), head, finisher, ended)
            await until_first(
                finish_all(w, cases, seed, times), finisher.run(), committer_main(run, committer, open_table)
            )
    finally:
        await coordination.close()
        await etcd.stop()
    return times


async def new_run(coordination: EtcdCoordination, store: Path) -> Run:
    config, _ = load_config_with(HERE.parent / "examples" / "tiny.toml", [f"run.store={store}"])
    prints = Fingerprints(model="-", tokenizer="-", template="-", prompts="-", held_out="-")
    file = RunFile(
        run="benchmark", created_at_us=0, config=config.model_dump(mode="json"), model_folder="-", prompts=1,
        held_out=0, fingerprints=prints,
    )  # fmt: skip
    storage = LocalStorage(store)
    await write_run(storage, file)
    manifest = RunManifest(
        run=file.run, store=storage.url, store_id=file.store_id, generation=1, format_version=file.format_version
    )
    await coordination.put(Keys(file.run).manifest, manifest.dump())
    return await open_run(coordination, file.run, SystemClock(), storage)


async def finish_all(w: World, cases: Sequence[Case], seed: int, times: dict[str, Times]) -> None:
    for case in cases:
        columns = sample_rows(case.rows, case.tokens, seed)
        mine = times.setdefault(case.name, {"registered": [], "visible": [], "read": []})
        for repeat in range(-1, case.repeats):  # the first one warms up and is not counted
            held = await w.draw(case.rows)
            took = await w.finish(finished_rows(columns, held), held)
            if repeat >= 0:
                for part, value in took.items():
                    mine[part].append(value)
        held = await w.draw(case.rows * case.repeats)
        many = {name: values * case.repeats for name, values in columns.items()}
        mine["all at once"] = [(await w.finish(finished_rows(many, held), held))["read"]]


def finished_rows(columns: dict[str, list[Any]], held: Sequence[Held]) -> list[Finished]:
    result = []
    for n, h in enumerate(held):
        partial = Partial(
            prompt_ids=columns["prompt_ids"][n],
            token_ids=columns["token_ids"][n],
            policy_mask=columns["policy_mask"][n],
            logprobs=columns["logprobs"][n],
            spans=[Span(0, 0, "rollout", "d00d")],
            turn=0,
            turn_state="scoring",
            environment_state=None,
            finish_reason="stop",
            started_at=0,
        )
        result.append(
            Finished(
                group=h.id[0], sample=h.id[1], prompt_index=h.id[0], epoch=0, partial=partial, finish_reason="stop",
                status="ok", error="", reward=columns["reward"][n], reward_parts={}, text="", attempts=0, finished_at=0,
            )
        )  # fmt: skip
    return result


def measure_queue(cases: Sequence[Case], seed: int) -> dict[str, Times] | str:
    """transferqueue's times, or why there are none."""
    try:
        python = queue_python()
        task = {"seed": seed, "cases": [vars(case) for case in cases]}
        done = subprocess.run(
            [python, HERE / "transferqueue_baseline.py"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=TQ_DEADLINE_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        )
    except subprocess.CalledProcessError as e:
        return f"{TQ_PACKAGES[0]} cannot be installed: {last_line(e.stderr)}"
    except subprocess.TimeoutExpired:
        return f"{TQ_PACKAGES[0]} did not end within {TQ_DEADLINE_S:g} s"
    if done.returncode != 0:
        return f"{TQ_PACKAGES[0]} ended with {done.returncode}: {last_line(done.stderr)}"
    times: dict[str, Times] = json.loads(done.stdout.splitlines()[-1])
    return times


def queue_python() -> Path:
    """The interpreter of transferqueue's environment; made on first use, with the torch that Laminar uses."""
    python = TQ_VENV / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import transfer_queue"], capture_output=True).returncode == 0:
        return python
    print(f"installing {TQ_PACKAGES[0]} into {TQ_VENV.name}; this takes minutes", flush=True)
    torch = f"torch=={version('torch').partition('+')[0]}"
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(TQ_VENV)],
        [str(python), "-m", "pip", "install", "--quiet", *TQ_PACKAGES, torch],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True)
    return python


def last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def sync_ms(folder: Path) -> float:
    """What one durable append of 4 KB takes here: the disk's part in everything below."""
    times = []
    handle = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(50):
        before = time.perf_counter()
        os.write(handle, bytes(4096))
        os.fdatasync(handle)
        times.append(1e3 * (time.perf_counter() - before))
    os.close(handle)
    return statistics.median(times)


def spread(values: Sequence[float], scale: float = 1e3, digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = (scale * x for x in (min(values), statistics.median(values), max(values)))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def report_finish(cases: Sequence[Case], ours: dict[str, Times], queue: dict[str, Times] | str) -> None:
    for case in cases:
        mine = ours[case.name]
        print(f"\n1. finish: {case.rows} rows of {case.tokens} tokens, {case.megabytes:.1f} MB, {case.repeats} repeats")
        print("   Laminar, durable           ms since the finish")
        for part, words in (
            ("registered", "segment synced, registered"),
            ("visible", "committed, synced, seen"),
            ("read", "read whole"),
        ):
            print(f"     {words:28s} {spread(mine[part])}")
        rate = case.repeats * case.megabytes / mine["all at once"][0]
        print(f"     {case.repeats} x as many rows at once      {1e3 * mine['all at once'][0]:.0f} ms, {rate:.0f} MB/s")
        if isinstance(queue, str):
            print(f"   transferqueue: not measured. {queue}")
            continue
        theirs = queue[case.name]
        put = [a + b for a, b in zip(theirs["convert"], theirs["put"], strict=True)]
        total = [a + b for a, b in zip(put, theirs["get"], strict=True)]
        print("   transferqueue, in memory    ms since the finish")
        print(f"     {'lists to tensors':28s} {spread(theirs['convert'], digits=1)}")
        print(f"     {'and put':28s} {spread(put, digits=1)}")
        print(f"     {'and got':28s} {spread(total, digits=1)}   {case.megabytes / statistics.median(total):.0f} MB/s")
        ratio = statistics.median(mine["read"]) / statistics.median(total)
        print(f"   Laminar / transferqueue     {ratio:.2f} x the time until read")


async def measure_stream(options: argparse.Namespace, folder: Path) -> None:
    n, rate, seconds = options.trajectories, options.rate, options.seconds
    shares: dict[str, list[partials.Share]] = {"alone": [], "without": [], "with": []}
    for repeat in range(options.repeats):
        shares["alone"].append(await partials.stream_alone(n, rate, seconds))
        for name, sync in (("without", False), ("with", True)) if repeat % 2 else (("with", True), ("without", False)):
            shares[name].append(await partials.stream(folder, f"{name}-{repeat}", n, rate, seconds, sync=sync))
    alone = statistics.median(s.cpu_share for s in shares["alone"])
    print(f"\n2. stream: {n} trajectories at {rate:g} tokens/s, a flush every {partials.FLUSH_S} s, {seconds:g} s each")
    print(f"     tokens kept in memory only   {spread([s.cpu_share for s in shares['alone']], 100, 1)} % of a core")
    for name in ("without", "with"):
        cost = [s.cpu_share - alone for s in shares[name]]
        last = shares[name][-1]
        print(
            f"     streamed {name + ' fsync':18s}  + {spread(cost, 100, 1)} % of a core, {last.flushes} flushes, "
            f"{last.log_bytes / last.tokens:.1f} bytes a token"
        )


async def measure_recovery(options: argparse.Namespace, folder: Path) -> None:
    n, tokens = options.trajectories, options.partial_tokens
    storage = LocalStorage(folder / "recovery")
    await partials.write_log(storage, "dead", n, tokens, options.seed)
    times = [await partials.recover(storage, "dead", n, tokens) for _ in range(1 + options.repeats)][1:]
    total = [a + b for a, b in times]
    print(f"\n3. recover: {n} trajectories of {tokens} tokens, {options.repeats} repeats, from the page cache")
    print(f"     log read and checked         {spread([a for a, _ in times])} ms")
    print(f"     trajectories put together    {spread([b for _, b in times])} ms")
    rate = n * tokens / statistics.median(total) / 1e6
    print(f"     both                         {spread(total)} ms, {rate:.1f} M tokens/s")


async def measure(options: argparse.Namespace, folder: Path) -> None:
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before; 4 KB appended with fdatasync: {sync_ms(folder):.2f} ms")
    if "finish" in options.parts:
        cases = [Case("large", 256, 4096, options.repeats), Case("small", 16, 512, 2 * options.repeats)]
        queue = await asyncio.to_thread(measure_queue, cases, options.seed)
        report_finish(cases, await measure_finish(cases, folder, options.seed), queue)
    if "stream" in options.parts:
        await measure_stream(options, folder)
    if "recover" in options.parts:
        await measure_recovery(options, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", type=lambda s: s.split(","), default=["finish", "stream", "recover"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=256, help="of parts 2 and 3")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens a second of each trajectory in part 2")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each repeat of part 2")
    parser.add_argument("--partial-tokens", type=int, default=8_000, help="tokens of each trajectory in part 3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the system's temporary folder)")
    options = parser.parse_args()
    if unknown := set(options.parts) - {"finish", "stream", "recover"}:
        parser.error(f"--parts has {', '.join(sorted(unknown))}; there are finish, stream and recover")
    with tempfile.TemporaryDirectory(prefix="buffer-benchmark-", dir=options.folder) as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
