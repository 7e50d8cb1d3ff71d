"""What moving weights on one host costs, beside the least it could cost. Prints one table.

    python benchmarks/weights.py --megabytes 256 --repeats 5

publish   the trainer's stall: copying bf16 tensors into an arena  / a memcpy of the same bytes into touched memory
pull      a rollout opens, maps and reads every byte once          / loading and reading the same safetensors file
          the same                                                 / saving that file, then loading and reading it
cast      float32 masters to bf16, which the trainer may do beforehand: reported apart
Also: what goes on around the copy (reserve and map before it, unmap and seal after it), which no trainer need wait for.
Times are medians, in milliseconds; each repeat alternates both sides, so that a busy machine slows them alike. The
file is written to and read from the page cache, without a sync: the comparison favours it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from laminar.relay.client import RelayConnection
from laminar.relay.server import RelayServer
from laminar.relay.tensors import copy_into, layout_of, views

Times = dict[str, list[float]]
WARM_UP = 5
"""Rounds not counted: until each arena of the relay, and both sides' memory, have been touched."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the bf16 weights, 10^6 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    masters = model(arguments.megabytes * 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "relay.sock"
        stop = serve(path)
        try:
            times = measure(
                masters, RelayConnection(path, timeout=60), Path(folder) / "w.safetensors", arguments.repeats
            )
        finally:
            stop()
    report(times, sum(t.numel() * 2 for t in masters.values()), arguments.repeats)


def model(nbytes: int) -> dict[str, torch.Tensor]:
    """float32 tensors whose bf16 copies have about `nbytes` bytes: layers of four matrices and two norms."""
    width = 1024
    layers = max(1, nbytes // (2 * (4 * width * width + 2 * width)))
    tensors = {}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            tensors[f"layers.{layer}.{name}.weight"] = torch.randn(width, width)
        for name in ("norm1", "norm2"):
            tensors[f"layers.{layer}.{name}.weight"] = torch.randn(width)
    return tensors


def serve(path: Path) -> Callable[[], None]:
    """A relay in a thread of its own; returns what stops it."""
    started, loop, done = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with RelayServer(path):
            started.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    if not started.wait(30):
        raise RuntimeError("the relay did not start within 30 s")

    def stop() -> None:
        loop.call_soon_threadsafe(done.set)
        thread.join()

    return stop


def measure(masters: dict[str, torch.Tensor], relay: RelayConnection, file: Path, repeats: int) -> Times:
    times: Times = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return result

    weights = {name: tensor.bfloat16() for name, tensor in masters.items()}
    layout = layout_of(weights)
    source = torch.cat([t.reshape(-1) for t in weights.values()]).view(torch.uint8)
    touched = torch.ones_like(source)
    safetensors.torch.save_file(weights, file)
    for version in range(WARM_UP + repeats):
        timed("cast", lambda: [weights[name].copy_(tensor) for name, tensor in masters.items()])
        timed("memcpy", lambda: touched.copy_(source))
        arena = timed("reserve", lambda: relay.reserve(layout))
        if arena is None:
            raise RuntimeError("the relay is busy; is memory short?")
        timed("publish", partial(copy_into, arena.buffer, layout, weights))
        timed("seal", partial(arena.seal, version))
        pulled = timed("pull", lambda: pull(relay))
        loaded = timed("load", lambda: touch(safetensors.torch.load_file(file)))
        if pulled != loaded:
            raise RuntimeError(f"both ways must give the same bytes: {pulled} and {loaded}")
    times = {name: values[WARM_UP:] for name, values in times.items()}
    # After the rounds above, which what is still to be written to the disk would disturb.
    for _ in range(repeats):
        timed("pull again", lambda: pull(relay))
        timed("save", lambda: safetensors.torch.save_file(weights, file))
        timed("load again", lambda: touch(safetensors.torch.load_file(file)))
    return times


def pull(relay: RelayConnection) -> int:
    with relay.open() as mapped:
        return touch(views(mapped.buffer, mapped.layout))


def touch(tensors: dict[str, torch.Tensor]) -> int:
    """Reads every byte once; the sum of all bits as 64-bit words, wrapped (equal whatever the order)."""
    return sum(int(t.reshape(-1).view(torch.int64).sum()) for t in tensors.values()) & (2**64 - 1)


def report(times: Times, nbytes: int, repeats: int) -> None:
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{nbytes / 1e6:.0f} MB of bf16 weights, median of {repeats}, torch threads {torch.get_num_threads()}")
    for name, base, words in (
        ("publish", "memcpy", "trainer's stall / memcpy into touched memory"),
        ("pull", "load", "open, map, read all / safetensors load, read all"),
    ):
        ratio = median[name] / median[base]
        print(f"{name:8} {median[name]:8.1f} ms  {base:7} {median[base]:8.1f} ms  ratio {ratio:5.2f}   {words}")
    saved = [save + load for save, load in zip(times["save"], times["load again"], strict=True)]
    faster = statistics.median(b / a for a, b in zip(times["pull again"], saved, strict=True))
    print(
        f"pull     {median['pull again']:8.1f} ms  by file {statistics.median(saved):8.1f} ms  {faster:5.1f} times as "
        "fast as saving and loading that file"
    )
    print(f"{'cast':8} {median['cast']:8.1f} ms  float32 -> bf16, apart from the stall")
    print(f"{'reserve':8} {median['reserve']:8.1f} ms  ask and map an arena: may be done before the step ends")
    print(f"{'seal':8} {median['seal']:8.1f} ms  unmap, checksums in the relay: while the trainer goes on")


if __name__ == "__main__":
    main()
