"""What the difference of two successive versions takes beside the whole: bytes, seconds to compute, and on a link.

    python benchmarks/delta.py                                         # steps of the tiny model on random tokens
    python benchmarks/delta.py --model PATH --rates 1e-6,1e-5          # of another one
    python benchmarks/delta.py --checkpoints runs/NAME/checkpoints     # successive checkpoints of a run

changed   share of the 16-bit words that differ; a checkpoint's weights are in the dtype in which its run published
          them (`model.dtype`), all others in bfloat16
ratio     bytes sent / bytes of the version, in pieces of `--piece-mib`; a piece over half of its bytes goes whole
GB/s      bytes of the version / seconds of one thread to encode, and to apply
hop       seconds of one transfer between two relays over a link shaped to `--mbit`, whole / as differences, checked
          both times; medians of `--repeats`. Needs root; without, or with `--mbit 0`, it is left out.
A run that keeps a checkpoint of each step, for --checkpoints runs/steps/checkpoints:

    laminar run examples/quickstart.toml --set run.name=steps --set run.max_steps=8 \\
      --set trainer.checkpoint_every=1 --set trainer.keep_checkpoints=8
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from relay import NodeProcess, broadcast_file, chain, shaped, tidy_when_told_to_end
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from laminar.relay.delta import apply, encode
from laminar.relay.tensors import copy_into, layout_of
from laminar.workers.checkpoints import EXPORT, INFO
from laminar.workers.models import resolve_model

MAKING = (__doc__ or "").split("\n\n")[-1].strip()
"""The command that makes checkpoints to measure."""
SHARE = 0.5
WARM_UP = 3
"""Steps before the first pair: the optimizer's first ones move every weight by the learning rate."""


def flat(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> bytearray:
    """The version as relays hold it, in `dtype` if given."""
    layout = layout_of(tensors, dtype)
    buffer = bytearray(layout.total_bytes)
    copy_into(memoryview(buffer), layout, tensors)
    return buffer


def trained(model: str, rate: float, pairs: int) -> Iterator[bytearray]:
    """Versions of a model under AdamW, with float32 master weights, on random tokens."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.9, 0.99))
    for step in range(WARM_UP + pairs + 1):
        if step >= WARM_UP:
            yield flat(dict(network.state_dict()), torch.bfloat16)
        tokens = torch.randint(0, network.config.vocab_size, (4, 32))
        optimizer.zero_grad()
        network(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()


def checkpoints(folder: Path) -> list[Path]:
    """The complete ones, oldest first. Raises SystemExit unless there are two, which is said with the remedy."""
    found = sorted(path.parent for path in folder.glob(f"step-*/{INFO}"))
    if len(found) < 2:
        raise SystemExit(
            f"{folder} has {len(found)} checkpoint{'' if len(found) == 1 else 's'}, a difference needs at least 2. "
            f"A run that keeps one of each step, in runs/steps/checkpoints:\n\n    {MAKING}"
        )
    return found


def exported(checkpoint: Path) -> bytearray:
    """The weights as they were published."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((checkpoint / EXPORT).glob("*.safetensors")):
        tensors |= load_file(file)
    return flat(tensors)


def measure(label: str, base: bytearray, new: bytearray, arguments: argparse.Namespace) -> None:
    piece = arguments.piece_mib << 20
    target = bytearray(len(new))
    sent, encoding, applying = 0, 0.0, 0.0
    for start in range(0, len(new), piece):
        bounds = slice(start, min(len(new), start + piece))
        before, after, result = memoryview(base)[bounds], memoryview(new)[bounds], memoryview(target)[bounds]
        began = time.perf_counter()
        encoded = encode(before, after, limit=int(SHARE * after.nbytes))
        encoding += time.perf_counter() - began
        if encoded is None:
            sent += after.nbytes
            result[:] = after
            continue
        sent += len(encoded)
        began = time.perf_counter()
        apply(before, result, encoded)
        applying += time.perf_counter() - began
    if target != new:
        raise RuntimeError(f"{label}: the result differs")
    changed = float(numpy.mean(numpy.frombuffer(base, "<u2") != numpy.frombuffer(new, "<u2")))
    whole, difference = hop_seconds(base, new, arguments)
    applied = f"{len(new) / applying / 1e9:8.2f}" if applying else "       -"
    hop = f"{whole:8.2f} {difference:8.2f} {difference / whole:8.3f}" if whole else "       -        -        -"
    print(
        f"{label:24} {len(new) / 2**20:8.1f} {changed:8.2%} {sent / len(new):8.2%} {len(new) / encoding / 1e9:8.2f} "
        f"{applied} {hop}",
        flush=True,
    )


def hop_seconds(base: bytearray, new: bytearray, arguments: argparse.Namespace) -> tuple[float, float]:
    """Medians of whole transfers and of differences; zeros where there is no link to shape."""
    if not arguments.mbit or os.geteuid() != 0:
        return 0.0, 0.0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "base", Path(folder) / "new"]
        for file, data in zip(files, (base, new), strict=True):
            file.write_bytes(data)
        for options in (["--whole"], ["--retain", "2"]):
            names = ["d0", "d1"]
            chunk = ["--chunk-kib", "1024", "--piece-kib", str(arguments.piece_mib << 10)]
            relays = [*chunk, *options]
            with shaped(2, arguments.mbit) as namespaces, chain(names, relays, namespaces) as nodes:
                results.append(_hops(nodes, files, arguments.repeats))
    return results[0], results[1]


def _hops(nodes: list[NodeProcess], files: list[Path], repeats: int) -> float:
    seconds = []
    for version in range(repeats + 1):
        received = broadcast_file(nodes, version, files[version % 2])
        if version > 0:
            seconds.append(received[0]["seconds"])
    return statistics.median(seconds)


def main() -> None:
    tidy_when_told_to_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny-reverse")
    parser.add_argument(
        "--rates", type=lambda text: [float(part) for part in text.split(",")], default=[1e-6, 2e-5, 3e-4]
    )
    parser.add_argument("--pairs", type=int, default=1, help="pairs of versions a learning rate")
    parser.add_argument("--checkpoints", type=Path, help="folder of successive checkpoints, instead of training")
    parser.add_argument("--piece-mib", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=160.0, help="rate of the link; 0: no link")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    steps = checkpoints(arguments.checkpoints) if arguments.checkpoints else []
    columns = ("MiB", "changed", "ratio", "encode", "apply", "whole s", "delta s", "time")
    print(f"{'versions':24} " + " ".join(f"{column:>8}" for column in columns))
    if steps:
        for (before, base), (after, new) in itertools.pairwise((step.name, exported(step)) for step in steps):
            measure(f"{before[-5:]} -> {after[-5:]}", base, new, arguments)
        return
    for rate in arguments.rates:
        for base, new in itertools.pairwise(trained(arguments.model, rate, arguments.pairs)):
            measure(f"learning rate {rate:g}", base, new, arguments)


if __name__ == "__main__":
    main()
