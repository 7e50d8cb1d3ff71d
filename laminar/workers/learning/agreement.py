"""How far the engine's distribution is from the trainer's under the same weights.

A step's batch is usually a version or more old, and its difference is then staleness. So a few trajectories that were
sampled under the very weights about to be updated are scored beside the batch: one forward pass, no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from laminar.workers.learning.base import Sample
from laminar.workers.learning.batching import pack
from laminar.workers.learning.forward import score
from laminar.workers.learning.inputs import assemble, row_of, scored_mask
from laminar.workers.learning.losses import kl_k3


@torch.no_grad()
def engine_kl(
    model: Any, samples: Sequence[Sample], *, temperature: float, budget: int, share_prompts: bool, device: torch.device
) -> float | None:
    """The k3 estimate of KL(engine || trainer), nats, mean over the policy's tokens; None without any token."""
    masks = [scored_mask(sample) for sample in samples]
    rows = [row_of(i, s, mask) for i, (s, mask) in enumerate(zip(samples, masks, strict=True)) if len(mask)]
    sums: list[float] = []
    for micro in pack(rows, budget=budget, share_prompts=share_prompts):
        inputs = assemble(samples, masks, micro, device)
        logprobs = score(model, inputs.prompts, inputs.ids, inputs.mask, temperature=temperature).logprobs
        sums.append(float(kl_k3(inputs.behaviour, logprobs, inputs.mask).to(torch.float64).sum()))
    tokens = sum(int(mask.sum()) for mask in masks)
    return math.fsum(sums) / tokens if tokens else None
