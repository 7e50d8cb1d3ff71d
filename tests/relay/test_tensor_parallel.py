"""Which part of each tensor a rank of a tensor-parallel engine reads."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.errors import ConfigError, WeightsError
from laminar.relay.layout import Layout
from laminar.relay.tensor_parallel import TensorParallel

HEAD, HIDDEN, INNER, VOCABULARY = 16, 128, 192, 1000
CONFIG: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}


def layout(**more: tuple[int, ...]) -> Layout:
    """One layer as Llama and Qwen2 have it, in bfloat16."""
    heads, kv = CONFIG["num_attention_heads"] * HEAD, CONFIG["num_key_value_heads"] * HEAD
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (heads, HIDDEN),
        f"{layer}.self_attn.q_proj.bias": (heads,),
        f"{layer}.self_attn.k_proj.weight": (kv, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (kv, HIDDEN),
        f"{layer}.self_attn.v_proj.bias": (kv,),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, heads),
        f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}.mlp.down_proj.bias": (HIDDEN,),
        **more,
    }
    return Layout.from_tensors({name: ("bfloat16", shape) for name, shape in shapes.items()})


def reads(ranks: int) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """(start, shape) of each rank's block, by the last two parts of the tensor's name."""
    plan = TensorParallel.of_config(CONFIG, ranks)
    blocks = {spec.name: [plan.block(spec, rank) for rank in range(ranks)] for spec in layout().tensors}
    return {".".join(name.split(".")[-2:]): [(b.start, b.shape) for b in found] for name, found in blocks.items()}


def test_heads_and_hidden_units_are_dealt_out() -> None:
    found = reads(2)
    assert found["q_proj.weight"] == [((0, 0), (64, HIDDEN)), ((64, 0), (64, HIDDEN))]
    assert found["q_proj.bias"] == [((0,), (64,)), ((64,), (64,))]
    assert found["k_proj.weight"] == [((0, 0), (16, HIDDEN)), ((16, 0), (16, HIDDEN))]
    assert found["o_proj.weight"] == [((0, 0), (HIDDEN, 64)), ((0, 64), (HIDDEN, 64))]
    assert found["down_proj.weight"][1] == ((0, 96), (HIDDEN, 96))
    assert found["down_proj.bias"] == [((0,), (HIDDEN,))] * 2, "added once, by rank 0, but loaded by all"
    assert found["input_layernorm.weight"] == found["norm.weight"] == [((0,), (HIDDEN,))] * 2


def test_more_ranks_than_key_value_heads_share_them() -> None:
    found = reads(4)
    assert [start for start, _ in found["v_proj.bias"]] == [(0,), (0,), (16,), (16,)]


def test_the_last_rank_has_less_of_a_vocabulary_that_is_no_multiple_of_64() -> None:
    assert [(start[0], shape[0]) for start, shape in reads(2)["embed_tokens.weight"]] == [(0, 512), (512, 488)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_ranks_together_read_every_byte_of_the_model(ranks: int) -> None:
    plan = TensorParallel.of_config(CONFIG, ranks)
    for spec in layout().tensors:
        seen = bytearray(spec.nbytes)
        for rank in range(ranks):
            for offset, nbytes in plan.block(spec, rank).byte_ranges(spec):
                start = offset - spec.offset
                seen[start : start + nbytes] = b"\x01" * nbytes
        assert all(seen), spec.name
    read = [sum(plan.block(spec, rank).nbytes(spec) for spec in layout().tensors) for rank in range(ranks)]
    whole = sum(spec.nbytes for spec in layout().tensors)
    assert max(read) < whole / ranks * 1.2 and sum(read) >= whole


def test_heads_that_cannot_be_dealt_out_are_refused_before_an_engine_starts() -> None:
    with pytest.raises(ConfigError, match="8 attention heads and 2 key-value heads cannot be dealt out to 3 devices"):
        TensorParallel.of_config(CONFIG, 3)
    with pytest.raises(ConfigError, match="cannot be dealt out to 2"):
        TensorParallel.of_config({"num_attention_heads": 8, "num_key_value_heads": 3}, 2)
    assert TensorParallel.of_config({"num_attention_heads": 8}, 4).kv_heads == 8


def test_tensors_that_cannot_be_cut_or_are_not_known_are_named() -> None:
    plan = TensorParallel.of_config(CONFIG, 2)
    odd = layout(**{"model.layers.1.mlp.up_proj.weight": (7, HIDDEN), "model.layers.1.moe.gate.weight": (4, HIDDEN)})
    tensors = {spec.name: spec for spec in odd.tensors}
    with pytest.raises(WeightsError, match=r"7 rows of tensor 'model.layers.1.mlp.up_proj.weight'.* to 2 ranks"):
        plan.block(tensors["model.layers.1.mlp.up_proj.weight"], 0)
    with pytest.raises(WeightsError, match=r"'model.layers.1.moe.gate.weight' .* is none of which it is known"):
        plan.block(tensors["model.layers.1.moe.gate.weight"], 0)
