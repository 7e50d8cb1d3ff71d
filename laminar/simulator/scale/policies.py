"""What is compared: who waits for whom, as a few values each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pipeline(Enum):
    TURNS = "all GPUs generate a batch, then all train on it"
    ONE_STEP = "the next batch is generated while the last one is trained on; both wait for each other"
    STREAM = "mini-batches are trained on as they are complete; the next batch waits for the new weights"
    FLOWING = "nobody waits: groups are drawn, trained on and weights taken whenever one can"


class Repack(Enum):
    OFF = "tails stay where they are"
    BLIND = "tails are packed by their present tokens, as in the paper's Algorithm 1"
    GROWING = "tails are packed with the growth to be expected, and only where it pays"


@dataclass(frozen=True)
class Policy:
    """`ready`: no more is drawn while a step's complete groups wait for the trainer. `continuous`: a rollout draws as
    soon as it has room; else it draws as many as it takes, and again when all of them have ended. `interrupt`: weights
    are swapped under what runs, whose KV cache is computed anew. `together`: there are no relays; the trainer and all
    rollouts stop for each exchange of weights."""

    pipeline: Pipeline
    says: str
    ready: bool = True
    continuous: bool = True
    repack: Repack = Repack.OFF
    interrupt: bool = False
    together: bool = False


POLICIES = {
    "synchronous": Policy(Pipeline.TURNS, "synchronous, all GPUs in turns (verl)"),
    "one-step": Policy(Pipeline.ONE_STEP, "one step stale, global synchronisation"),
    "stream": Policy(Pipeline.STREAM, "mini-batches streamed into training, global synchronisation"),
    "partial": Policy(
        Pipeline.FLOWING,
        "partial rollout: weights change within trajectories, in all rollouts at once (AReaL)",
        ready=False,
        interrupt=True,
        together=True,
    ),
    "laminar-batch": Policy(Pipeline.FLOWING, "rollouts take batch after batch, no repack", continuous=False),
    "laminar-batch-blind": Policy(
        Pipeline.FLOWING,
        "the paper: batch after batch, repack by present tokens",
        continuous=False,
        repack=Repack.BLIND,
    ),
    "laminar-batch-repack": Policy(
        Pipeline.FLOWING, "batch after batch, repack with growth", continuous=False, repack=Repack.GROWING
    ),
    "laminar-interrupt": Policy(
        Pipeline.FLOWING, "weights change within trajectories, from relays (rollout.update = interrupt)", interrupt=True
    ),
    "laminar-off": Policy(Pipeline.FLOWING, "drawing while newest, no repack"),
    "laminar-blind": Policy(Pipeline.FLOWING, "drawing while newest, repack by present tokens", repack=Repack.BLIND),
    "laminar-ahead": Policy(
        Pipeline.FLOWING, "drawing while newest, whatever waits for the trainer", ready=False, repack=Repack.GROWING
    ),
    "laminar": Policy(Pipeline.FLOWING, "drawing while newest, repack with growth", repack=Repack.GROWING),
}
