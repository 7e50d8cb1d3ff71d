"""What each rank of a tensor-parallel engine reads of a version: by names, for models like Llama and Qwen2. Pure.

    q_proj, gate_proj, up_proj   rows: heads, or hidden units, are dealt out
    k_proj, v_proj               rows: heads; more ranks than heads share them
    o_proj, down_proj            columns of the weight; the bias whole
    embed_tokens, lm_head        rows of a vocabulary that is padded to a multiple of 64
    norms                        whole

These are the rules by which vLLM's own weight loaders cut the tensors that they are given (vllm 0.32,
model_executor/layers/linear.py and vocab_parallel_embedding.py). The loaders do the cutting, out of the mapped arena;
here is what they need to be able to, which is checked before an engine starts, and how much that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from laminar.errors import ConfigError, WeightsError
from laminar.relay.blocks import Block
from laminar.relay.layout import TensorSpec

VOCABULARY_PADDING = 64


class Cut(Enum):
    ROWS = "rows"
    SHARED_ROWS = "rows of key or value heads"
    COLUMNS = "columns"
    VOCABULARY = "rows of the vocabulary"
    WHOLE = "whole"


CUTS: Mapping[str, Cut] = {
    "q_proj": Cut.ROWS,
    "k_proj": Cut.SHARED_ROWS,
    "v_proj": Cut.SHARED_ROWS,
    "gate_proj": Cut.ROWS,
    "up_proj": Cut.ROWS,
    "o_proj": Cut.COLUMNS,
    "down_proj": Cut.COLUMNS,
    "embed_tokens": Cut.VOCABULARY,
    "lm_head": Cut.VOCABULARY,
}


@dataclass(frozen=True)
class TensorParallel:
    """`ranks` processes with a model of `heads` attention heads and `kv_heads` key and value heads."""

    ranks: int
    heads: int
    kv_heads: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], ranks: int) -> TensorParallel:
        """For a model's config.json. Raises ConfigError if its heads cannot be dealt out to as many ranks."""
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        shared = ranks % kv_heads == 0 if ranks >= kv_heads else kv_heads % ranks == 0
        if heads % ranks or not shared:
            raise ConfigError(
                f"{heads} attention heads and {kv_heads} key-value heads cannot be dealt out to {ranks} devices; "
                "choose rollout.tensor_parallel so that it divides both, or is a multiple of the latter"
            )
        return cls(ranks, heads, kv_heads)

    def block(self, spec: TensorSpec, rank: int) -> Block:
        """What `rank` reads of a tensor. Raises WeightsError if the tensor is none that these rules know, or if it
        cannot be cut as they say."""
        cut = cut_of(spec)
        if cut is None:
            raise WeightsError(
                f"tensor {spec.name!r} of shape {spec.shape} is none of which it is known how ranks share it; known "
                f"are {', '.join(CUTS)} and norms"
            )
        match cut:
            case Cut.WHOLE:
                return Block.whole(spec.shape)
            case Cut.VOCABULARY:
                padded = -(-spec.shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
                share = self._share(spec, cut, padded, self.ranks)
                start, end = (min(i * share, spec.shape[0]) for i in (rank, rank + 1))
                return Block.along(spec.shape, 0, start, end - start)
            case Cut.SHARED_ROWS if self.ranks > self.kv_heads:
                size = self._share(spec, cut, spec.shape[0], self.kv_heads)
                return Block.along(spec.shape, 0, rank // (self.ranks // self.kv_heads) * size, size)
            case Cut.COLUMNS if len(spec.shape) == 2:
                size = self._share(spec, cut, spec.shape[1], self.ranks)
                return Block.along(spec.shape, 1, rank * size, size)
            case Cut.COLUMNS:
                return Block.whole(spec.shape)
            case _:
                size = self._share(spec, cut, spec.shape[0], self.ranks)
                return Block.along(spec.shape, 0, rank * size, size)

    def _share(self, spec: TensorSpec, cut: Cut, side: int, parts: int) -> int:
        if side % parts:
            raise WeightsError(
                f"{side} {cut.value} of tensor {spec.name!r} cannot be dealt out to {self.ranks} ranks; "
                "choose another rollout.tensor_parallel"
            )
        return side // parts


def cut_of(spec: TensorSpec) -> Cut | None:
    """By the name of the module, the last but one part; None for a name that these rules do not know."""
    module = spec.name.rpartition(".")[0].rpartition(".")[2]
    if module in CUTS:
        return CUTS[module]
    return Cut.WHOLE if module.endswith("norm") and len(spec.shape) <= 1 else None
