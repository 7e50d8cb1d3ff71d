"""Engines of several ranks: what vLLM's loaders take out of a mapped version, and that the ranks make one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from laminar.errors import ConfigError, EngineError, WeightsError
from laminar.relay.client import RelayConnection
from laminar.relay.layout import Layout
from laminar.relay.server import RelayServer
from laminar.relay.tensor_parallel import TensorParallel
from laminar.relay.tensors import copy_into, layout_of, views
from laminar.workers.engines.base import RelayWeights
from laminar.workers.engines.vllm import VllmEngine
from laminar.workers.engines.vllm_output import of_all_ranks
from laminar.workers.engines.weights import ModelTensors, check_ranks

HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCABULARY = 4, 2, 32, 128, 96, 200
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
PARALLEL = ("linear", "vocab_parallel_embedding")


def make_model(seed: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512, initializer_range=0.15,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes vLLM's layers believe that they are of that rank; no process group is needed to load weights."""
    import importlib

    modules = [importlib.import_module(f"vllm.model_executor.layers.{name}") for name in PARALLEL]
    modules.append(importlib.import_module("vllm.model_executor.parameter"))

    def become(rank: int, ranks: int) -> None:
        for module in modules:
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)

    yield become


def loaded_by_vllm(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's parallel modules, filled by vLLM's own loaders, as the parts of its fused weights by their names."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer, result = "model.layers.0", {}
    qkv = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=True)
    sizes = [qkv.num_heads * HEAD, qkv.num_kv_heads * HEAD, qkv.num_kv_heads * HEAD]
    for kind in ("weight", "bias"):
        parameter = getattr(qkv, kind)
        for part in "qkv":
            parameter.weight_loader(parameter, tensors[f"{layer}.self_attn.{part}_proj.{kind}"], part)
        for part, data in zip("qkv", parameter.data.split(sizes), strict=True):
            result[f"{layer}.self_attn.{part}_proj.{kind}"] = data
    gate_up = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False)
    for index, part in enumerate(("gate", "up")):
        gate_up.weight.weight_loader(gate_up.weight, tensors[f"{layer}.mlp.{part}_proj.weight"], index)
    for part, data in zip(("gate", "up"), gate_up.weight.data.chunk(2), strict=True):
        result[f"{layer}.mlp.{part}_proj.weight"] = data
    for name, side in (("self_attn.o_proj", HEADS * HEAD), ("mlp.down_proj", INNER)):
        row = RowParallelLinear(side, HIDDEN, bias=False)
        row.weight.weight_loader(row.weight, tensors[f"{layer}.{name}.weight"])
        result[f"{layer}.{name}.weight"] = row.weight.data
    embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN)
    embedding.weight.weight_loader(embedding.weight, tensors["model.embed_tokens.weight"])
    rows = embedding.shard_indices.org_vocab_end_index - embedding.shard_indices.org_vocab_start_index
    result["model.embed_tokens.weight"] = embedding.weight.data[:rows]
    return result


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vllm_loads_of_each_tensor_the_block_of_its_rank_and_reads_no_other_byte(as_rank: Any, ranks: int) -> None:
    """Compared bit for bit. Then once more from memory in which all bytes that are not the rank's are others."""
    weights = dict(make_model(3).state_dict())
    layout = layout_of(weights)
    plan = TensorParallel.of_config(CONFIG, ranks)
    buffer = bytearray(layout.total_bytes)
    copy_into(memoryview(buffer), layout, weights)
    for rank in range(ranks):
        as_rank(rank, ranks)
        loaded = loaded_by_vllm(views(memoryview(bytes(buffer)), layout))
        specs = {spec.name: spec for spec in layout.tensors if spec.name in loaded}
        assert len(specs) == len(loaded) == 11
        for name, spec in specs.items():
            expected = weights[name][plan.block(spec, rank).slices]
            assert torch.equal(loaded[name], expected), (name, rank)
        again = loaded_by_vllm(views(memoryview(others_changed(buffer, layout, plan, rank)), layout))
        assert all(torch.equal(again[name], loaded[name]) for name in loaded)


def others_changed(buffer: bytearray, layout: Layout, plan: TensorParallel, rank: int) -> bytes:
    """`buffer`, with every byte inverted that `rank` does not read."""
    result = bytearray(byte ^ 0xFF for byte in buffer)
    for spec in layout.tensors:
        for offset, nbytes in plan.block(spec, rank).byte_ranges(spec):
            result[offset : offset + nbytes] = buffer[offset : offset + nbytes]
    return bytes(result)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_two_ranks_serve_what_the_relay_holds_and_end_with_their_engine(tmp_path: Path) -> None:
    models = [make_model(seed) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path / "model")
    async with RelayServer(tmp_path / "run" / "relay.sock", chunk_bytes=1 << 16) as relay:
        engine = VllmEngine(
            tmp_path / "model", dtype="float32", max_running=4, max_model_len=128, kv_cache_mib=32, tensor_parallel=2
        )
        await engine.start()
        ranks = [psutil.Process(pid) for pid in engine._processes]
        assert len(ranks) == 2
        try:
            for version, model in enumerate(models):
                await engine.load(await publish(relay, version, model))
                assert engine.version == version and await off_by(engine, model) < 1e-3
            with pytest.raises(WeightsError, match="does not hold version 7"):
                await engine.load(RelayWeights(str(relay.socket_path), 7, "0" * 64))
            assert engine.version == 1 and await off_by(engine, models[1]) < 1e-3, "both ranks refused it"
        finally:
            await engine.close()
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


async def publish(relay: RelayServer, version: int, model: Any) -> RelayWeights:
    def seal() -> str:
        tensors = model.state_dict()
        layout = layout_of(tensors)
        arena = RelayConnection(relay.socket_path).reserve(layout)
        assert arena is not None
        copy_into(arena.buffer, layout, tensors)
        return arena.seal(version).digest

    return RelayWeights(str(relay.socket_path), version, await asyncio.to_thread(seal))


async def off_by(engine: VllmEngine, model: Any) -> float:
    """The greatest difference of a logprob from transformers' own on the same weights."""
    prompt = list(range(20, 50))
    stream = engine.generate(
        f"request-{engine.version}-{id(model)}-{torch.rand(1).item()}", prompt, max_tokens=12, temperature=1.0,
        stop_token_ids=[],
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = torch.tensor([value for chunk in chunks for value in chunk.logprobs])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float((logprobs - expected).abs().max())


def test_ranks_that_disagree_leave_no_version() -> None:
    loaded, refused = {"outcome": "loaded"}, {"outcome": "refused", "error": "not held"}
    assert of_all_ranks([loaded, loaded]) == loaded
    assert of_all_ranks([refused, refused]) == refused
    assert of_all_ranks([loaded, refused]) == {"outcome": "broken", "error": "rank 1 of 2: not held"}
    broken = {"outcome": "broken", "error": "no memory"}
    assert of_all_ranks([broken]) == broken
    assert of_all_ranks([refused, broken])["outcome"] == "broken"


def test_a_model_that_cannot_be_dealt_out_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path)
    model = ModelTensors.of_folder(tmp_path, "float32")
    check_ranks(tmp_path, model, 4)
    with pytest.raises(ConfigError, match="4 attention heads and 2 key-value heads cannot be dealt out to 3 devices"):
        check_ranks(tmp_path, model, 3)
    with pytest.raises(ConfigError, match="to 8 devices"):
        check_ranks(tmp_path, model, 8)


async def test_that_refusal_reaches_whoever_starts_the_engine(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path)
    engine = VllmEngine(tmp_path, dtype="float32", max_running=1, max_model_len=64, tensor_parallel=3)
    with pytest.raises((ConfigError, EngineError), match="cannot be dealt out to 3"):
        await engine.start()
