"""What a rollout may rely on, whichever engine serves: one suite, each engine, tied and untied embeddings.

The engines serve tiny random models of 512 tokens in float32; what is right is said by transformers on the same
weights.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from laminar.errors import EngineError, WeightsError
from laminar.relay.client import RelayConnection
from laminar.relay.layout import checksums, version_digest
from laminar.relay.server import RelayServer
from laminar.relay.tensors import copy_into, layout_of
from laminar.workers.engines.base import Chunk, Engine, EngineCapacity, FolderWeights, RelayWeights

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

VOCABULARY = 512
MAX_MODEL_LEN = 256
CHUNK_BYTES = 1 << 16
PROMPT = list(range(100, 140))
SEEDS = (11, 22, 33)
"""One set of weights each; version 1 is made from SEEDS[1] and so on."""


def make_model(seed: int, *, tied: bool, hidden: int = 64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    # Weights of 0.15 instead of 0.02: distributions that are far from uniform, so that a mistake shows.
    options = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": hidden // 32, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied,
    }  # fmt: skip
    model = Qwen2ForCausalLM(Qwen2Config(**options)) if tied else LlamaForCausalLM(LlamaConfig(**options))
    return model.eval()


def named_weights(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


@dataclass
class Bench:
    """An engine, a relay and the models whose weights are versions 0, 1, 2 of it."""

    kind: str
    folder: Path
    engine: Engine
    socket: str
    models: list[Any]
    capacity: EngineCapacity = field(init=False)
    counter: int = 0

    async def publish(self, version: int, model: Any, dtype: torch.dtype | None = None) -> RelayWeights:
        def seal() -> str:
            tensors = named_weights(model)
            layout = layout_of(tensors, dtype)
            arena = RelayConnection(self.socket).reserve(layout)
            assert arena is not None
            copy_into(arena.buffer, layout, tensors)
            return arena.seal(version).digest

        return RelayWeights(self.socket, version, await asyncio.to_thread(seal))

    def folder_weights(self, version: int = 0, digest: str = "") -> FolderWeights:
        return FolderWeights(str(self.folder), version, digest)

    async def collect(self, prompt: list[int], **options: Any) -> list[Chunk]:
        return [chunk async for chunk in self.stream(prompt, **options)]

    def stream(self, prompt: list[int], *, id: str = "", **options: Any) -> AsyncIterator[Chunk]:
        self.counter += 1
        settings = {"max_tokens": 24, "temperature": 1.0, "stop_token_ids": []} | options
        return self.engine.generate(id or f"request-{self.counter}", prompt, **settings)

    def reference(self, model: int, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            logits = self.models[model](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float], str | None]:
    assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, [x for chunk in chunks for x in chunk.logprobs], chunks[-1].finish_reason


def off_by(
    bench: Bench, model: int, chunks: list[Chunk], prompt: list[int] = PROMPT, temperature: float = 1.0
) -> float:
    tokens, logprobs, _ = joined(chunks)
    assert tokens
    return float((torch.tensor(logprobs) - bench.reference(model, prompt, tokens, temperature)).abs().max())


def make_engine(kind: str, folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "dtype": "float32", "max_running": 16, "max_model_len": MAX_MODEL_LEN, "chunk_bytes": CHUNK_BYTES,
    } | options  # fmt: skip
    if kind == "vllm":
        from laminar.workers.engines.vllm import VllmEngine

        return VllmEngine(folder, kv_cache_mib=32, **settings)
    from laminar.workers.engines.transformers import TransformersEngine

    return TransformersEngine(folder, **settings)


VLLM = (pytest.mark.slow, pytest.mark.vllm)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(("transformers", True), id="transformers-tied"),
        pytest.param(("transformers", False), id="transformers-untied"),
        pytest.param(("vllm", True), id="vllm-tied", marks=VLLM),
        pytest.param(("vllm", False), id="vllm-untied", marks=VLLM),
    ],
)
async def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    kind, tied = request.param
    models = [make_model(seed, tied=tied) for seed in SEEDS]
    root = tmp_path_factory.mktemp("engine")
    models[0].save_pretrained(root / "model")
    relay = RelayServer(root / "run" / "relay.sock", chunk_bytes=CHUNK_BYTES, retain=4, spare=4)
    (root / "run").mkdir(mode=0o700)
    await relay.start()
    bench = Bench(kind, root / "model", make_engine(kind, root / "model"), str(relay.socket_path), models)
    bench.capacity = await bench.engine.start()
    try:
        yield bench
    finally:
        await bench.engine.close()
        await relay.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def bench(started: Bench) -> AsyncIterator[Bench]:
    """Each test begins with the initial model as version 0 and must leave nothing running."""
    await started.engine.load(started.folder_weights())
    yield started
    assert started.engine.load_report().running == 0


@pytest.fixture(autouse=True)
def _quiet_threads() -> Iterator[None]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield


async def test_before_the_first_load_there_is_no_version_to_generate_under(started: Bench) -> None:
    if started.counter:
        pytest.skip("another test has loaded weights into this engine")
    assert started.engine.version == -1
    with pytest.raises(EngineError, match="before the first load"):
        await started.collect(PROMPT)


async def test_capacity_says_what_fits(bench: Bench) -> None:
    assert bench.capacity.max_running == 16
    assert bench.capacity.max_model_len == MAX_MODEL_LEN
    assert bench.capacity.kv_tokens >= MAX_MODEL_LEN


async def test_a_stream_arrives_while_it_is_generated_and_ends_by_length(bench: Bench) -> None:
    chunks = await bench.collect(PROMPT, max_tokens=40)
    tokens, logprobs, finish = joined(chunks)
    assert (len(tokens), len(logprobs), finish) == (40, 40, "length")
    assert len(chunks) > 5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_of_the_distribution_sampled_from(bench: Bench, temperature: float) -> None:
    """Case 9: at temperature 0.6 with identical weights on both sides the importance ratio is 1."""
    chunks = await bench.collect(PROMPT, temperature=temperature, max_tokens=48)
    assert off_by(bench, 0, chunks, temperature=temperature) < 1e-3


async def test_logprobs_hold_when_requests_of_all_lengths_share_the_batch(bench: Bench) -> None:
    prompts = [PROMPT[:length] for length in (1, 3, 17, 40)]
    results = await asyncio.gather(*(bench.collect(p, max_tokens=5 + 7 * i) for i, p in enumerate(prompts)))
    for i, (prompt, chunks) in enumerate(zip(prompts, results, strict=True)):
        assert len(joined(chunks)[0]) == 5 + 7 * i
        assert off_by(bench, 0, chunks, prompt) < 1e-3


async def test_greedy_takes_the_most_likely_token(bench: Bench) -> None:
    tokens, _, _ = joined(await bench.collect(PROMPT, temperature=0.0, max_tokens=12))
    with torch.no_grad():
        logits = bench.models[0](torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


async def test_a_stop_token_ends_the_request_and_is_part_of_it(bench: Bench) -> None:
    """Case 57: only what the caller names stops; the model's own eos (2) is a token like any other."""
    tokens, _, _ = joined(await bench.collect(PROMPT, temperature=0.0, max_tokens=12))
    stop = tokens[5]
    first = tokens.index(stop)
    stopped, logprobs, finish = joined(
        await bench.collect(PROMPT, temperature=0.0, max_tokens=12, stop_token_ids=[stop, 511])
    )
    assert (stopped, finish) == (tokens[: first + 1], "stop")
    assert len(logprobs) == len(stopped)


async def test_the_models_own_eos_does_not_stop_unless_it_is_named(bench: Bench) -> None:
    # One token in some hundreds is the eos: a round of 1,600 misses it one time in twenty, twelve in a row never do.
    for _ in range(12):
        results = await asyncio.gather(
            *(bench.collect([2, 2, 2 + i], max_tokens=200, temperature=2.0) for i in range(8))
        )
        assert {joined(chunks)[2] for chunks in results} == {"length"}
        if any(2 in joined(chunks)[0][:-1] for chunks in results):
            return
    raise AssertionError("the eos was never sampled")


async def test_equal_seeds_give_equal_samples_and_none_gives_new_ones(bench: Bench) -> None:
    runs = [joined(await bench.collect(PROMPT, seed=seed))[0] for seed in (5, 5, 6, None, None)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 4


async def test_a_reply_ends_where_the_models_length_does(bench: Bench) -> None:
    tokens, _, finish = joined(await bench.collect(PROMPT, max_tokens=10_000))
    assert (len(PROMPT) + len(tokens), finish) == (MAX_MODEL_LEN, "length")


async def test_abort_midway_keeps_what_was_generated(bench: Bench) -> None:
    """Cases 4 and 48: an aborted stream ends with 'abort', after valid tokens; resuming continues it exactly."""
    whole, _, _ = joined(await bench.collect(PROMPT, temperature=0.0, max_tokens=60))
    chunks: list[Chunk] = []
    async for chunk in bench.stream(PROMPT, id="cut", temperature=0.0, max_tokens=60):
        chunks.append(chunk)
        if sum(len(c.token_ids) for c in chunks) >= 10 and chunk.finish_reason is None:
            await bench.engine.abort("cut")
    part, _, finish = joined(chunks)
    assert finish == "abort"
    assert 10 <= len(part) < 60
    rest, _, finish = joined(await bench.collect(PROMPT + part, temperature=0.0, max_tokens=60 - len(part)))
    assert (part + rest, finish) == (whole, "length")


async def test_abort_during_prefill_is_legal(bench: Bench) -> None:
    """Case 48: abort during prefill, no token yet: it ends with 'abort', and the same id may be used again."""
    stream = bench.stream(PROMPT, id="early", max_tokens=200)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await bench.engine.abort("early")
    chunks = [await first]
    chunks += [chunk async for chunk in stream]
    tokens, _, finish = joined(chunks)
    assert finish == "abort"
    assert len(tokens) < 200
    assert joined(await bench.collect(PROMPT, id="early"))[2] == "length"


async def test_abort_of_an_unknown_request_is_ignored(bench: Bench) -> None:
    await bench.engine.abort("never-was")


async def test_more_requests_than_fit_wait_for_their_turn(bench: Bench) -> None:
    tasks = [asyncio.create_task(bench.collect(PROMPT, max_tokens=60)) for _ in range(20)]
    waited = 0
    while not all(task.done() for task in tasks):
        load = bench.engine.load_report()
        assert load.running <= 16
        assert load.running + load.waiting <= 20
        waited = max(waited, load.waiting)
        await asyncio.sleep(0.002)
    assert waited >= 4
    assert all(len(joined(task.result())[0]) == 60 for task in tasks)
    load = bench.engine.load_report()
    assert (load.running, load.waiting, load.kv_tokens) == (0, 0, 0)
    assert load.step_s >= 0 and 1 <= load.batch_limit <= 16, "measured, or the engine's limit"


async def test_a_caller_that_goes_away_frees_its_place(bench: Bench) -> None:
    tasks = [asyncio.create_task(bench.collect(PROMPT, max_tokens=200)) for _ in range(4)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert bench.engine.load_report().running == 0
    assert joined(await bench.collect(PROMPT))[2] == "length"


async def test_new_weights_speak_at_once(bench: Bench) -> None:
    """Each load is checked against transformers: a head that keeps the old embeddings would differ by 0.3 nats."""
    for version in (1, 2, 1):
        await bench.engine.load(await bench.publish(version, bench.models[version]))
        assert bench.engine.version == version
        chunks = await bench.collect(PROMPT)
        assert off_by(bench, version, chunks) < 1e-3
        assert off_by(bench, (version + 1) % 3, chunks) > 0.1


async def test_no_prefix_is_shared_across_versions(bench: Bench) -> None:
    """Case 6: the same prompt before and after an update never hits the old version's cache, nor on the way back."""
    prompt = [token % VOCABULARY for token in range(7, 207)]
    weights = await bench.publish(1, bench.models[1])
    for source, model in ((bench.folder_weights(), 0), (weights, 1), (bench.folder_weights(), 0)):
        await bench.engine.load(source)
        for _ in range(2):
            assert off_by(bench, model, await bench.collect(prompt, max_tokens=4), prompt) < 1e-3


async def test_what_was_begun_under_the_old_version_leaves_nothing_in_the_cache(bench: Bench) -> None:
    """Case 6, while a request runs: its blocks hold a mixture of two versions, which no later request may read."""
    weights = await bench.publish(1, bench.models[1])
    stream = bench.stream(PROMPT, temperature=0.0, max_tokens=180)
    chunks = [await anext(stream)]
    await bench.engine.load(weights)
    chunks += [chunk async for chunk in stream]
    tokens, _, _ = joined(chunks)
    await bench.engine.load(bench.folder_weights())
    prompt = PROMPT + tokens[:160]
    assert off_by(bench, 0, await bench.collect(prompt, max_tokens=4), prompt) < 1e-3


async def test_a_load_that_fails_leaves_the_old_version(bench: Bench) -> None:
    """Case 5: applying new weights fails; the version does not advance, the old weights go on."""
    good = await bench.publish(1, bench.models[1])
    await bench.engine.load(good)
    tied = bench.models[0].config.tie_word_embeddings
    other = await bench.publish(7, make_model(1, tied=tied, hidden=96))
    half = await bench.publish(8, bench.models[2], torch.bfloat16)
    failures = [
        (replace(good, digest="0" * 64), "digest"),
        (replace(good, version=99), "99"),
        (replace(good, socket=good.socket + ".gone"), "relay"),
        (other, "another model"),
        (half, "bfloat16"),
        (FolderWeights(str(bench.folder / "nowhere"), 3, ""), "nowhere"),
    ]
    for source, message in failures:
        with pytest.raises(WeightsError, match=message):
            await bench.engine.load(source)
        assert (bench.engine.version, bench.engine.digest) == (1, good.digest)
    await bench.engine.check()
    assert off_by(bench, 1, await bench.collect(PROMPT)) < 1e-3


async def test_a_folder_is_checked_against_the_versions_digest(bench: Bench) -> None:
    """Adoption of an old version from a checkpoint's export: the bytes must be those that were published."""
    tensors = named_weights(bench.models[0])
    layout = layout_of(tensors)
    buffer = memoryview(bytearray(layout.total_bytes))
    copy_into(buffer, layout, tensors)
    digest = version_digest(layout, checksums(buffer, CHUNK_BYTES))
    await bench.engine.load(bench.folder_weights(4, digest))
    assert (bench.engine.version, bench.engine.digest) == (4, digest)
    assert off_by(bench, 0, await bench.collect(PROMPT)) < 1e-3
    with pytest.raises(WeightsError, match="does not hold version 5"):
        await bench.engine.load(bench.folder_weights(5, digest[::-1]))
    assert bench.engine.version == 4


async def test_the_version_that_a_slow_caller_cancelled_is_the_one_served(bench: Bench) -> None:
    """A cancelled load either happened or did not; the version and the weights never disagree."""
    weights = await bench.publish(1, bench.models[1])
    loading = asyncio.create_task(bench.engine.load(weights))
    await asyncio.sleep(0.001)
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    await bench.engine.settled()
    assert (bench.engine.version, bench.engine.digest) in [(0, ""), (1, weights.digest)]
    chunks = await bench.collect(PROMPT)
    assert off_by(bench, bench.engine.version, chunks) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt of 0 tokens"),
        ({"prompt": [1] * MAX_MODEL_LEN}, f"max_model_len = {MAX_MODEL_LEN}"),
        ({"prompt": [1, VOCABULARY]}, f"token {VOCABULARY}"),
        ({"prompt": [-1]}, "token -1"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"temperature": 0.001}, "temperature 0.001"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"temperature": 2.5}, "temperature 2.5"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"stop_token_ids": [VOCABULARY]}, "stop tokens"),
    ],
)
async def test_a_bad_request_is_refused_by_name_and_hurts_no_other(
    bench: Bench, options: dict[str, Any], message: str
) -> None:
    other = asyncio.create_task(bench.collect(PROMPT))
    options = dict(options)
    with pytest.raises(EngineError, match=message):
        await bench.collect(options.pop("prompt", PROMPT), **options)
    assert joined(await other)[2] == "length"
    await bench.engine.check()


async def test_two_requests_cannot_have_one_id(bench: Bench) -> None:
    first = bench.stream(PROMPT, id="twin", max_tokens=200)
    await anext(first)
    with pytest.raises(EngineError, match="twin is running already"):
        await bench.collect(PROMPT, id="twin")
    await bench.engine.abort("twin")
    assert [chunk async for chunk in first][-1].finish_reason == "abort"


async def test_weights_that_give_no_numbers_are_an_error_not_nan(bench: Bench) -> None:
    """Case 13: a logprob that is not finite ends the request with a named error."""
    broken = make_model(1, tied=bench.models[0].config.tie_word_embeddings)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    await bench.engine.load(await bench.publish(9, broken))
    with pytest.raises(EngineError, match="logprob"):
        await bench.collect(PROMPT)


async def test_a_model_folder_without_weights_is_refused_at_start(tmp_path: Path, started: Bench) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = make_engine(started.kind, tmp_path)
    with pytest.raises((EngineError, WeightsError), match=r"model\.safetensors is missing"):
        await engine.start()
