"""Logprobs of trajectories under the model being trained, differentiable, with or without shared prompts.

    shared:  prompts [B, P], left-padded --prefill--> KV cache --repeat for each row--> responses [N, T - 1]
    plain:   prompt + response of each row, right-padded [N, L], one causal pass

Both give the logprob of the same distribution that the engine samples from: log_softmax(logits / temperature).
The gradient of the shared path flows through the cache into the prompt, summed over its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from laminar.workers.learning.losses import entropy

PAD = 0
"""Fills unused places of id tensors; never attended to, never scored, so any token will do."""

SHORT_BYTES = 256 << 20
"""Of attention weights that a micro-batch may hold for plain attention to be used on a CPU."""
CELL_BYTES = 8
"""Kept of each attention weight until the backward pass: in float32, in the model's type, and the mask's share."""


@dataclass(frozen=True)
class Prompted:
    """Rows that share a prompt: `rows` are indexes into the micro-batch's responses."""

    prompt_ids: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True)
class TokenScores:
    """float32 [N, T], 0 where the mask is false. `entropy` (nats) is detached."""

    logprobs: Tensor
    entropy: Tensor


def can_share_prompts(model: Any) -> bool:
    """Whether a prompt's keys and values are all that its responses need: full attention in every layer.

    Windowed or recurrent layers keep a state that left padding disturbs; they take the plain path.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if getattr(model, "_is_stateful", False) or getattr(config, "attention_chunk_size", None):
        return False
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is None


def score(
    model: Any, prompts: Sequence[Prompted], response_ids: Tensor, mask: Tensor, *, temperature: float,
    shared: bool | None = None,
) -> TokenScores:  # fmt: skip
    """`response_ids`: int64 [N, T], right-padded; `mask`: bool [N, T], true for the tokens to score.

    Every row is in exactly one of `prompts`. Takes the shared path where any prompt has more than one row, or as
    `shared` says: without it no prompt may have more than one row.
    """
    count, width = response_ids.shape
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    if shared is None:
        shared = any(len(prompt.rows) > 1 for prompt in prompts)
    cells = len(prompts) * longest**2 + count * width * (longest + width) if shared else count * (longest + width) ** 2
    model.set_attn_implementation(attention_for(model.config, response_ids.device, cells))
    if shared:
        return _score_shared(model, prompts, response_ids, mask, temperature)
    return _score_plain(model, prompts, response_ids, mask, temperature)


def attention_for(config: Any, device: torch.device, cells: int) -> str:
    """Name of transformers' attention for a pass over `cells` pairs of query and key at most.

    On a CPU torch's fused kernel is slow at the backward pass of short sequences; plain attention holds all weights.
    """
    text = config.get_text_config()
    held = cells * text.num_attention_heads * text.num_hidden_layers * CELL_BYTES
    return "eager" if device.type == "cpu" and held <= SHORT_BYTES else "sdpa"


def _score_plain(
    model: Any, prompts: Sequence[Prompted], response_ids: Tensor, mask: Tensor, temperature: float
) -> TokenScores:
    device = response_ids.device
    prompt_of = {prompt.rows[0]: prompt.prompt_ids for prompt in prompts}
    lengths = torch.tensor([len(prompt_of[row]) for row in range(len(response_ids))], device=device)
    total, shortest = int(lengths.max()) + response_ids.shape[1] - 1, int(lengths.min())
    ids = torch.full((len(response_ids), total), PAD, device=device)
    for row, response in enumerate(response_ids):
        prompt = torch.tensor(prompt_of[row], device=device)
        # The last response token is predicted, never an input; right padding needs no attention mask under causality.
        end = min(len(prompt) + len(response), total)
        ids[row, : len(prompt)] = prompt
        ids[row, len(prompt) : end] = response[: end - len(prompt)]
    first = shortest - 1
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=total - first).logits
    rows, columns = mask.nonzero(as_tuple=True)
    distribution = _log_distribution(logits[rows, lengths[rows] - 1 - first + columns], temperature)
    picked = distribution.gather(1, response_ids[rows, columns][:, None]).squeeze(1)
    return _scatter(mask, picked, entropy(distribution))


def _score_shared(
    model: Any, prompts: Sequence[Prompted], response_ids: Tensor, mask: Tensor, temperature: float
) -> TokenScores:
    device = response_ids.device
    count, width = response_ids.shape
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    prompt_ids = torch.full((len(prompts), longest), PAD, device=device)
    attended = torch.zeros((len(prompts), longest), dtype=torch.long, device=device)
    owner = torch.zeros(count, dtype=torch.long, device=device)
    for number, prompt in enumerate(prompts):
        prompt_ids[number, longest - len(prompt.prompt_ids) :] = torch.tensor(prompt.prompt_ids, device=device)
        attended[number, longest - len(prompt.prompt_ids) :] = 1
        owner[list(prompt.rows)] = number
    positions = (attended.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=prompt_ids, attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True,
        logits_to_keep=1,
    )  # fmt: skip
    # The first response token of every row follows from its prompt alone, whose distribution is computed once.
    distribution = _log_distribution(output.logits[:, -1], temperature)
    first_logprobs = distribution[owner, response_ids[:, 0]]
    first_entropy = entropy(distribution)[owner]
    is_first = torch.zeros_like(mask)
    is_first[:, 0] = mask[:, 0]
    scores = _scatter(is_first, first_logprobs[mask[:, 0]], first_entropy[mask[:, 0]])
    rows, columns = mask[:, 1:].nonzero(as_tuple=True)
    if len(rows) == 0:
        return scores
    _repeat(cache, prompts, owner)
    steps = torch.arange(width - 1, device=device)
    ends = torch.where(mask, torch.arange(1, width + 1, device=device), 0).amax(1)
    visible = torch.cat([attended[owner], (steps[None] < ends[:, None] - 1).long()], dim=1)
    logits = model(
        input_ids=response_ids[:, :-1], attention_mask=visible, position_ids=positions[owner, -1:] + 1 + steps,
        past_key_values=cache, use_cache=True,
    ).logits  # fmt: skip
    distribution = _log_distribution(logits[rows, columns], temperature)
    picked = distribution.gather(1, response_ids[rows, columns + 1][:, None]).squeeze(1)
    later = mask.clone()
    later[:, 0] = False
    rest = _scatter(later, picked, entropy(distribution))
    return TokenScores(scores.logprobs + rest.logprobs, scores.entropy + rest.entropy)


def _repeat(cache: Any, prompts: Sequence[Prompted], owner: Tensor) -> None:
    """Turn the cache of B prompts into that of N rows, in the order of the rows.

    Repeats by the largest group, then selects: the gradient of a repeat is one sum, accurate in bfloat16 too, whereas
    an index that repeats entries would add them up one by one in bfloat16. The selection has no repeated entry.
    """
    most = max(len(prompt.rows) for prompt in prompts)
    cache.batch_repeat_interleave(most)
    place = [0] * len(owner)
    for number, prompt in enumerate(prompts):
        for nth, row in enumerate(prompt.rows):
            place[row] = number * most + nth
    if place != list(range(len(prompts) * most)):
        cache.batch_select_indices(torch.tensor(place, device=owner.device))


def _log_distribution(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def _scatter(mask: Tensor, logprobs: Tensor, entropies: Tensor) -> TokenScores:
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return TokenScores(empty.masked_scatter(mask, logprobs), empty.masked_scatter(mask, entropies))
