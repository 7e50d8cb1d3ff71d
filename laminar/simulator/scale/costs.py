"""What things take: pure functions of batch, tokens and bytes.

    decode step   overhead + floor x max(1, batch / knee) + kv_s x tokens in the KV cache
                  └ launches   └ weights are read once; above the knee their arithmetic takes longer than that
    prefill       tokens / rate, in which nothing of that engine is decoded
    training      the slowest of: all tokens over all GPUs; the longest sequence over the GPUs that share one; the
                  exchange of parameters and gradients; for each mini-batch
    broadcast     T = (p + k - 2) t for p relays, k chunks, t seconds a chunk and hop

The figures come from what is published of GPU and model (`published.py`), from a measured table, or from a recorded
run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar.simulator.scale.published import MASTER_BYTES_PER_S, Gpu, Model
from laminar.workers.repack import KNEE

READ_SHARE, PREFILL_SHARE, DECODE_SHARE, TRAIN_SHARE = 0.85, 0.5, 0.6, 0.35
"""Of peak bandwidth and arithmetic that kernels reach, in the order of engines' and trainers' reports: reading weights
and KV cache, prefill, the matrix products of a large decode batch, training with sharded parameters."""
MEMORY_SHARE = 0.9
"""Of its memory that an engine takes (vLLM's default), for weights and KV cache."""
OVERHEAD_S, REDUCE_S = 2.5e-3, 1e-5
"""Of a decode step: launches and sampling; each of two reductions a layer between GPUs that share a model."""
TRAIN_FLOPS = 8.0
"""A parameter and trained token: 6 forward and backward, 2 for the logprobs before."""
STATE_BYTES = 18.0
"""A parameter in training: bf16 weights and gradients, fp32 master weights, moments and gradient; of 0.8 of the
memory."""
WEIGHTS_SHARE = 0.25
"""Of its GPUs' memory that weights take at most: what the smallest tensor-parallel size follows from."""
MACHINE = 8
"""GPUs of a machine, where nothing else is said."""
RELOAD_S = 1.0
"""To take weights into an engine beside their copying, and to get an engine's memory ready between two phases."""
CHUNK_BYTES = 64 << 20
LEAST_CONSTANT = 0.05
"""Of the fastest measured step: less than that is never the time in which weights are read, but an extrapolation."""


@dataclass(frozen=True)
class Decode:
    """A decode step of a batch, in seconds. `knee`: the batch from which the step is bound by arithmetic."""

    overhead_s: float
    floor_s: float
    knee: float
    kv_s: float

    def _flat_s(self, batch: int) -> float:
        return self.overhead_s + self.floor_s * max(1.0, batch / self.knee)

    def step_s(self, batch: int, kv_tokens: float) -> float:
        """One step of `batch` trajectories that have `kv_tokens` in the KV cache together."""
        return self._flat_s(batch) + self.kv_s * kv_tokens

    def steps_s(self, batch: int, kv_tokens: float, steps: float) -> float:
        """So many steps, in each of which every trajectory of the batch grows by a token."""
        return steps * self.step_s(batch, kv_tokens) + self.kv_s * batch * steps * steps / 2

    def steps_in(self, batch: int, kv_tokens: float, seconds: float) -> float:
        """How many steps these seconds hold: the inverse of `steps_s`."""
        first, growth = self.step_s(batch, kv_tokens), self.kv_s * batch
        # The stable root of growth/2 n^2 + first n = seconds, which is also right where growth is 0.
        return 2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))

    def batch_limit(self, context: float, limit: int) -> int:
        """The batch whose step takes KNEE times as long as that of one trajectory, each of `context` tokens; at most
        `limit`. What `engines.pace` measures in an engine."""
        most = KNEE * self.step_s(1, context)
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_s(middle, middle * context) <= most else (low, middle - 1)
        return low

    def rate(self, batch: int, context: float) -> float:
        """Tokens a second of a batch whose trajectories have `context` tokens each."""
        return batch / self.step_s(batch, batch * context)


def roofline(model: Model, gpu: Gpu, tensor_parallel: int) -> Decode:
    """Of `tensor_parallel` GPUs that hold the model together."""
    reductions = 2 * model.layers * REDUCE_S if tensor_parallel > 1 else 0.0
    bandwidth = READ_SHARE * gpu.memory_bytes_per_s * tensor_parallel
    floor_s = model.bytes / bandwidth
    kv_s = model.held_kv_bytes(tensor_parallel) / bandwidth
    each_s = 2 * model.parameters / (DECODE_SHARE * gpu.flops * tensor_parallel)
    return Decode(OVERHEAD_S + reductions, floor_s, max(1.0, floor_s / each_s), kv_s)


@dataclass(frozen=True)
class Fitted:
    """`untold`: what the rows do not tell, and what is supposed in its place; empty where they tell all."""

    decode: Decode
    untold: str = ""


def fitted(table: Sequence[Sequence[float]], model: Decode | None = None) -> Fitted:
    """The decode model nearest to rows of (batch, tokens in the KV cache, seconds of a step): least squares of relative
    errors. Needs one row at least.

    No more terms are fitted than there are different rows: first the constant, then the part of the KV cache where rows
    differ in it, then a knee between the batches. What the rows do not tell is as in `model`, or else nothing: a step
    that no row shows to become longer stays as long."""
    rows = np.array(sorted({tuple(float(v) for v in row) for row in table}))
    points, batches = len({(b, kv) for b, kv, _ in rows.tolist()}), np.unique(rows[:, 0])
    if points == 1 and model is not None:
        scale = float(np.mean(rows[:, 2])) / model.step_s(int(rows[0, 0]), rows[0, 1])
        decode = Decode(scale * model.overhead_s, scale * model.floor_s, model.knee, scale * model.kv_s)
        return Fitted(decode, "costs.decode has one kind of row: other batches are scaled from the model's")
    # Of two that are as near, the first is taken: that with fewer terms, and with the knee further up.
    knees = [float(b) for b in batches[-2::-1]]
    beyond = math.inf if model is None else model.knee
    if points > 2 and beyond < batches[-1]:
        knees, beyond = [beyond, *knees], float(batches[-1])
    tried = [_least_squares(rows, beyond, kv_term=False)]
    tried += [_least_squares(rows, knee, kv_term=False) for knee in knees if points > 1]
    if points > 1 and len(np.unique(rows[:, 1])) > 1:
        tried.append(_least_squares(rows, beyond, kv_term=True))
        tried += [_least_squares(rows, knee, kv_term=True) for knee in knees if points > 2]
    error, decode = tried[0]
    for other, each in tried[1:]:
        if other < error - 1e-9:
            error, decode = other, each
    return Fitted(decode, _untold(batches, points, decode, model))


def _least_squares(rows: np.ndarray, knee: float, *, kv_term: bool) -> tuple[float, Decode]:
    """The sum of squared relative errors, and the model; the KV cache's part is 0 where it would not be positive, or
    would leave next to nothing to the constant: weights are read in every step. Infinite errors where the knee itself
    leaves next to nothing: relative errors make a step of no length at all one whole error only."""
    batch, kv, seconds = rows[:, 0], rows[:, 1], rows[:, 2]
    shape = np.maximum(1.0, batch / knee)
    # Columns of about the same size: tokens are hundreds of thousands of times as many as steps.
    scale = max(1.0, float(kv.max()))
    matrix = np.stack([shape / seconds, kv / scale / seconds], axis=1)
    ones = np.ones(len(seconds))
    if kv_term:
        (flat_s, kv_s), _, rank, _ = np.linalg.lstsq(matrix, ones, rcond=1e-6)
        if rank == 2 and flat_s >= LEAST_CONSTANT * seconds.min() and kv_s >= 0:
            decode = Decode(0.0, float(flat_s), knee, float(kv_s) / scale)
            return float(((matrix @ [flat_s, kv_s] - 1) ** 2).sum()), decode
    column = matrix[:, 0]
    flat_s = float(column @ ones) / float(column @ column)
    error = float(((column * flat_s - 1) ** 2).sum()) if flat_s >= LEAST_CONSTANT * seconds.min() else math.inf
    return error, Decode(0.0, flat_s, knee, 0.0)


def _untold(batches: np.ndarray, points: int, decode: Decode, model: Decode | None) -> str:
    if points == 1:
        return f"costs.decode tells of a batch of {batches[0]:g} alone: a step is taken to be as long with any other"
    if len(batches) == 1:
        return f"costs.decode tells of a batch of {batches[0]:g} alone: of others, what the KV cache adds is supposed"
    if decode.knee > batches[-1] and model is None:
        return f"costs.decode shows no knee: above its largest batch, {batches[-1]:g}, none is supposed either"
    return ""


@dataclass(frozen=True)
class Train:
    """An optimizer step. `tokens_per_s`: of one GPU, logprobs included; `exchange_s`: of a mini-batch, in the
    background of its arithmetic; `shard`: GPUs that share one sequence, those of a machine."""

    tokens_per_s: float
    exchange_s: float
    shard: int = MACHINE

    def mini_batch_s(self, tokens: float, longest: float, gpus: int) -> float:
        spread = tokens / (self.tokens_per_s * gpus)
        alone = longest / (self.tokens_per_s * min(self.shard, gpus))
        return max(spread, alone, self.exchange_s)

    def step_s(self, tokens: Sequence[int] | np.ndarray, gpus: int, mini_batches: int) -> float:
        """`tokens`: of each trajectory, prompt included, in the order of training."""
        parts = np.array_split(np.asarray(tokens), min(mini_batches, len(tokens)))
        return sum(self.mini_batch_s(float(part.sum()), float(part.max()), gpus) for part in parts)


@dataclass(frozen=True)
class Weights:
    """How a version travels. `bytes_per_s`: onto the master relay, and of a hop; `load_s`: from the relay of its host
    into an engine."""

    bytes: float
    bytes_per_s: float
    load_s: float
    chunk_bytes: float = CHUNK_BYTES

    @property
    def publish_s(self) -> float:
        """The trainer's stall."""
        return self.bytes / self.bytes_per_s

    @property
    def together_s(self) -> float:
        """Where there are no relays: trainer and engines exchange weights at once, and wait for each other."""
        return self.publish_s + self.load_s

    def arrival_s(self, place: int) -> float:
        """From the publish until the relay at `place` of the chain (0: the master) holds the version."""
        chunks = max(1, math.ceil(self.bytes / self.chunk_bytes))
        chunk_s = min(self.chunk_bytes, self.bytes) / self.bytes_per_s
        return (place + chunks - 1) * chunk_s if place > 0 else 0.0

    def broadcast_s(self, relays: int) -> float:
        """T = (p + k - 2) t: until the last relay holds it."""
        return self.arrival_s(relays - 1)


@dataclass(frozen=True)
class Costs:
    """Everything that a simulated job needs to know of its hardware. `trainers_least`: GPUs that hold the training
    state; `kv_tokens`: of one engine's KV cache; `untold`: what measured rows do not tell of `decode`."""

    decode: Decode
    kv_tokens: int
    prefill_tokens_per_s: float
    train: Train
    weights: Weights
    tensor_parallel: int
    trainers_least: int
    untold: str = ""


def smallest_tensor_parallel(model: Model, gpu: Gpu) -> int:
    """The smallest power of two at which the weights take a quarter of the memory at most: 1, 4, 8 for 7B, 32B, 72B on
    80 GB."""
    size = 1
    while model.bytes > WEIGHTS_SHARE * gpu.memory_bytes * size:
        size *= 2
    return size


def published_costs(model: Model, gpu: Gpu, tensor_parallel: int = 0, machine: int = MACHINE) -> Costs:
    """From what is published. `tensor_parallel` 0: the smallest; `machine`: GPUs of one."""
    size = tensor_parallel or smallest_tensor_parallel(model, gpu)
    room = MEMORY_SHARE * gpu.memory_bytes * size - model.bytes
    copy_s = model.bytes / size / gpu.host_bytes_per_s
    # Fully sharded: parameters are gathered twice and gradients scattered once, each over a machine's network.
    exchange_s = 3 * model.bytes / gpu.machine_bytes_per_s
    return Costs(
        decode=roofline(model, gpu, size),
        kv_tokens=max(0, int(room / model.held_kv_bytes(size))),
        prefill_tokens_per_s=PREFILL_SHARE * gpu.flops * size / (2 * model.parameters),
        train=Train(TRAIN_SHARE * gpu.flops / (TRAIN_FLOPS * model.parameters), exchange_s, machine),
        weights=Weights(
            bytes=model.bytes,
            bytes_per_s=MASTER_BYTES_PER_S,
            load_s=copy_s + RELOAD_S,
        ),
        tensor_parallel=size,
        trainers_least=max(1, math.ceil(STATE_BYTES * model.parameters / (0.8 * gpu.memory_bytes))),
    )
