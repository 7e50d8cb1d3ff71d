"""Policy losses: pure functions on padded rows, [N, T] = trajectories x tokens after the prompt.

    log-ratio = policy logprob - behaviour logprob          (what the engine sampled with, never recomputed)
    loss      = sum over tokens of  token loss x token weight
    weight    = 1 / (tokens of the step)                      aggregation "token"
              = 1 / (sequences of the step x their tokens)    aggregation "sequence"
                the step: with the groups that are counted without signal, whose own losses are 0

`mask` is true where the token is trained: written by the policy, not padding, not in a trajectory left out. The
weights are those of the whole step, so that cutting it into micro-batches changes nothing. An empty response has no
token and no weight: it enters no mean, neither as a token nor as a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Loss = Literal["ppo_clip", "gspo", "cispo"]
Aggregation = Literal["token", "sequence"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is far beyond any clip, and float32 stays finite in the gradient."""


@dataclass(frozen=True)
class PolicyLoss:
    """All [N, T]. `token_loss` is differentiable and 0 outside the mask; the others are detached.

    `ratio` is policy / behaviour a token (1 outside the mask), whatever the loss; `clipped` is true where the clip or
    the cap cut the gradient or the weight.
    """

    token_loss: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss: Loss,
    clip_low: float,
    clip_high: float,
    importance_cap: float = 0.0,
) -> PolicyLoss:
    """`logprobs`, `behaviour_logprobs`: float32 [N, T], nats; `advantages`: float32 [N]; `mask`: bool [N, T].

    importance_cap = 0: the behaviour policy is the old policy of the ratio, clipped by the loss.
    importance_cap > 0 (truncated importance sampling, Yao et al. 2025 "Your efficient RL framework secretly brings
    you off-policy RL training"; decoupled as in AReaL, arXiv 2505.24298): the old policy is the present one, whose
    ratio is 1, and each token's loss is weighted with min(policy / behaviour, cap), without a gradient.
    """
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, mask)
    ratio = log_ratio.detach().exp()
    advantage = advantages[:, None].expand_as(logprobs)
    if importance_cap > 0:
        weight = ratio.clamp(max=importance_cap)
        token_loss = -weight * advantage * _log_ratio(logprobs, logprobs.detach(), mask).exp()
        clipped = ratio > importance_cap
    elif loss == "cispo":
        token_loss, clipped = _cispo(logprobs, ratio, advantage, clip_low, clip_high)
    else:
        used = _sequence_log_ratio(log_ratio, logprobs, mask) if loss == "gspo" else log_ratio
        token_loss, clipped = _clipped_surrogate(used.exp(), advantage, clip_low, clip_high)
    return PolicyLoss(torch.where(mask, token_loss, 0.0), ratio, clipped & mask)


def token_weights(mask: Tensor, aggregation: Aggregation, *, tokens: int, sequences: int) -> Tensor:
    """float32 [N, T]: the weight of each token's loss; sums to 1 over all the rows that the step counts.

    `tokens` and `sequences` count those of the *step*: true entries of their masks, and rows that have any.
    """
    if aggregation == "token":
        return mask.to(torch.float32) / max(tokens, 1)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mask.to(torch.float32) / (lengths * max(sequences, 1))


def kl_k3(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(sampler || other) a token, [N, T] >= 0, with x drawn from the policy of `logprobs`.

    q/p - 1 - log(q/p): unbiased, positive, of low variance. Schulman 2020, "Approximating KL divergence", k3.
    """
    log_quotient = _log_ratio(other, logprobs, mask)
    return torch.where(mask, log_quotient.exp() - 1 - log_quotient, 0.0)


def entropy(log_distribution: Tensor) -> Tensor:
    """[..., V] log-probabilities -> [...] entropy in nats; detached."""
    terms: Tensor = torch.special.entr(log_distribution.detach().exp())
    return terms.sum(-1)


def _log_ratio(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    difference = torch.where(mask, logprobs - old, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A). Schulman 2017, arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476."""
    kept = ratio * advantage
    cut = ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(kept, cut), (cut < kept).detach()


def _sequence_log_ratio(log_ratio: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """GSPO's ratio of a sequence, exp(mean log-ratio), on each of its tokens. Zheng et al. 2025, arXiv 2507.18071.

    The value is the sequence's, the gradient each token's own (GSPO-token): with one advantage a sequence its sum over
    the tokens, divided by their number, is the sequence's gradient.
    """
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (log_ratio.detach().sum(dim=1, keepdim=True) / lengths).expand_as(log_ratio)
    return mean + _log_ratio(logprobs, logprobs.detach(), mask)


def _cispo(logprobs: Tensor, ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: clips the weight, keeps each gradient. MiniMax-M1, arXiv 2506.13585."""
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantage * logprobs, weight != ratio
