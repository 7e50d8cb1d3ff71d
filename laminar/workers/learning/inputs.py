"""From trajectories to tensors: checks a batch, says which tokens are scored, and pads the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laminar.errors import LaminarError
from laminar.workers.learning.base import Sample
from laminar.workers.learning.batching import MicroBatch, Row
from laminar.workers.learning.forward import PAD, Prompted


@dataclass(frozen=True)
class Inputs:
    """A micro-batch of N rows and T response tokens: `ids` int64, `mask` bool, `behaviour` float32, all [N, T]."""

    prompts: list[Prompted]
    ids: Tensor
    mask: Tensor
    behaviour: Tensor


def check_batch(batch: Sequence[Sample], *, vocabulary: int) -> None:
    """Raises LaminarError naming the first trajectory that cannot be trained on, and what is wrong with it."""
    seen: set[tuple[int, int]] = set()
    for s in batch:
        name = f"trajectory {s.group}-{s.sample}"
        if (s.group, s.sample) in seen:
            raise LaminarError(f"{name} is twice in the batch")
        seen.add((s.group, s.sample))
        lengths = {len(s.token_ids), len(s.policy_mask), len(s.behaviour_logprobs)}
        if len(lengths) != 1:
            raise LaminarError(
                f"{name} has {len(s.token_ids)} tokens, {len(s.policy_mask)} mask entries and "
                f"{len(s.behaviour_logprobs)} logprobs; they must be equally many"
            )
        if not s.prompt_ids:
            raise LaminarError(f"{name} has an empty prompt; nothing predicts its first token")
        highest = max((*s.prompt_ids, *s.token_ids))
        if highest >= vocabulary or min((*s.prompt_ids, *s.token_ids)) < 0:
            raise LaminarError(f"{name} has a token outside the model's vocabulary of {vocabulary}, such as {highest}")
        for at, (logprob, policy) in enumerate(zip(s.behaviour_logprobs, s.policy_mask, strict=True)):
            if policy and not -float("inf") < logprob < float("inf"):
                raise LaminarError(f"{name} has the behaviour logprob {logprob} at token {at}; it must be finite")


def scored_mask(sample: Sample) -> Tensor:
    """bool [length]: the policy's tokens, cut after the last of them: nothing later can influence it."""
    mask = torch.tensor(sample.policy_mask, dtype=torch.bool)
    return mask[: int(mask.nonzero().max()) + 1] if bool(mask.any()) else mask[:0]


def row_of(index: int, sample: Sample, mask: Tensor) -> Row:
    return Row(index, (sample.group, tuple(sample.prompt_ids)), len(sample.prompt_ids), len(mask))


def assemble(batch: Sequence[Sample], masks: Sequence[Tensor], micro: MicroBatch, device: torch.device) -> Inputs:
    """`masks`: of each trajectory of the batch, as `scored_mask` gives them; the rows come in the order of `micro`."""
    order = micro.rows
    place = {row: n for n, row in enumerate(order)}

    def padded(rows: Sequence[Tensor], fill: float) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=fill).to(device)

    return Inputs(
        prompts=[Prompted(batch[b.rows[0]].prompt_ids, [place[row] for row in b.rows]) for b in micro.blocks],
        ids=padded([torch.tensor(batch[i].token_ids[: len(masks[i])]) for i in order], PAD),
        mask=padded([masks[i] for i in order], False),
        behaviour=padded([torch.tensor(batch[i].behaviour_logprobs[: len(masks[i])]) for i in order], 0.0),
    )
