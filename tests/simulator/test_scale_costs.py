"""Cost models: positive, monotone, and what is published of them; the engine that they drive; lengths."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laminar.errors import ConfigError
from laminar.simulator.scale.costs import Decode, Train, Weights, fitted, published_costs, roofline
from laminar.simulator.scale.engine import Engine, Request
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.lengths import Lengths, read_trace
from laminar.simulator.scale.published import GPUS, MODELS
from laminar.simulator.scale.report import as_json, facts
from laminar.simulator.scale.settings import settings_from

decodes = st.builds(
    Decode,
    overhead_s=st.floats(0, 0.01),
    floor_s=st.floats(1e-4, 0.05),
    knee=st.floats(1, 500),
    kv_s=st.floats(0, 1e-6),
)
batches, tokens = st.integers(1, 512), st.floats(0, 1e6)


@settings(deadline=None)
@given(decode=decodes, batch=batches, kv=tokens, steps=st.floats(1e-3, 20_000))
def test_a_decode_step_costs_something_and_more_with_more(decode: Decode, batch: int, kv: float, steps: float) -> None:
    assert 0 < decode.step_s(batch, kv) <= decode.step_s(batch + 1, kv)
    assert decode.step_s(batch, kv) <= decode.step_s(batch, kv + 1)
    assert decode.steps_s(batch, kv, steps) >= steps * decode.step_s(batch, kv) * (1 - 1e-9)


@settings(deadline=None)
@given(decode=decodes, batch=batches, kv=tokens, steps=st.floats(1e-3, 20_000))
def test_how_many_steps_fit_is_the_inverse_of_how_long_they_take(
    decode: Decode, batch: int, kv: float, steps: float
) -> None:
    assert decode.steps_in(batch, kv, decode.steps_s(batch, kv, steps)) == pytest.approx(steps, rel=1e-6)


@settings(deadline=None)
@given(decode=decodes, context=st.floats(1, 20_000), limit=st.integers(1, 512))
def test_the_batch_limit_is_the_largest_batch_of_at_most_one_and_a_half_steps(
    decode: Decode, context: float, limit: int
) -> None:
    found = decode.batch_limit(context, limit)
    assert 1 <= found <= limit
    assert found == 1 or decode.step_s(found, found * context) <= 1.5 * decode.step_s(1, context)
    assert found == limit or decode.step_s(found + 1, (found + 1) * context) > 1.5 * decode.step_s(1, context)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=64), gpus=st.integers(1, 512))
def test_a_training_step_is_never_slower_on_more_gpus_nor_faster_with_more_tokens(
    lengths: list[int], gpus: int
) -> None:
    train = Train(tokens_per_s=5000.0, exchange_s=0.1)
    assert 0 < train.step_s(lengths, gpus + 1, 4) <= train.step_s(lengths, gpus, 4) * (1 + 1e-9)
    assert train.step_s([n + 1 for n in lengths], gpus, 4) >= train.step_s(lengths, gpus, 4)


@settings(deadline=None)
@given(relays=st.integers(2, 500), size=st.floats(1e6, 1e12))
def test_a_broadcast_takes_p_plus_k_minus_2_chunks(relays: int, size: float) -> None:
    weights = Weights(size, 1e11, load_s=1.0)
    chunks = math.ceil(size / weights.chunk_bytes)
    chunk_s = min(size, weights.chunk_bytes) / 1e11
    assert weights.broadcast_s(relays) == pytest.approx((relays + chunks - 2) * chunk_s)
    assert weights.arrival_s(0) == 0 and weights.arrival_s(relays) > weights.arrival_s(relays - 1)


@pytest.mark.parametrize(("name", "size", "low_ms", "high_ms"), [
    ("qwen2.5-7b", 1, 6, 10), ("qwen2.5-32b", 4, 8, 14), ("qwen2.5-72b", 8, 9, 16),
])  # fmt: skip
def test_published_costs_are_of_the_size_that_engines_report(
    name: str, size: int, low_ms: float, high_ms: float
) -> None:
    """7B decodes 100 to 160 tokens a second alone; tensor parallel 1, 4, 8; 72B is on 128 hosts in 1.6 s."""
    costs = published_costs(MODELS[name], GPUS["h800"])
    assert costs.tensor_parallel == size
    assert low_ms < 1000 * costs.decode.step_s(1, 1000) < high_ms
    assert costs.kv_tokens > 500_000
    if name == "qwen2.5-72b":
        assert costs.weights.publish_s == pytest.approx(1.40, abs=0.05)
        assert costs.weights.broadcast_s(128) == pytest.approx(1.5, abs=0.1)


def test_a_measured_table_gives_its_own_model_back() -> None:
    model = roofline(MODELS["qwen2.5-7b"], GPUS["h800"], 1)
    table = [(b, b * 3000.0, model.step_s(b, b * 3000.0)) for b in (1, 8, 64, 128)]
    table += [(b, b * 500.0, model.step_s(b, b * 500.0)) for b in (1, 64, 128)]
    found = fitted(table)
    for batch, kv, seconds in table:
        assert found.decode.step_s(batch, kv) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("row", [(64, 192_000, 0.0118), (1, 84, 0.018), (4, 0, 0.05)])
def test_one_row_tells_the_constant_alone_and_that_is_said(row: tuple[float, float, float]) -> None:
    """The whole step in the part of the KV cache: 6 us for a trajectory alone, four times as long with four."""
    found = fitted([row, row])
    for batch in (1, 4, 64, 1000):
        assert found.decode.step_s(batch, 100.0 * batch) == pytest.approx(row[2])
    assert f"a batch of {row[0]:g} alone" in found.untold


def test_one_row_scales_the_model_where_there_is_one() -> None:
    model = roofline(MODELS["qwen2.5-7b"], GPUS["h800"], 1)
    found = fitted([(64, 192_000, 3 * model.step_s(64, 192_000))], model)
    for batch in (1, 64, 512):
        assert found.decode.step_s(batch, 3000 * batch) == pytest.approx(3 * model.step_s(batch, 3000 * batch))
    assert "scaled from the model's" in found.untold


def test_rows_of_one_batch_tell_of_the_cache_and_rows_of_one_context_of_the_batch() -> None:
    same_batch = fitted([(8, 1000, 0.01), (8, 200_000, 0.02)])
    assert same_batch.decode.step_s(8, 100_500) == pytest.approx(0.015) and "a batch of 8 alone" in same_batch.untold
    same_cache = fitted([(8, 1000, 0.01), (16, 1000, 0.02), (32, 1000, 0.04)])
    assert same_cache.decode.step_s(16, 1000) == pytest.approx(0.02)
    assert same_cache.decode.step_s(1, 1000) == pytest.approx(0.01)


rows = st.lists(
    st.tuples(st.integers(1, 512), st.floats(0, 1e6), st.floats(1e-4, 1)), min_size=1, max_size=6
).map(lambda rows: [(float(b), kv, s) for b, kv, s in rows])  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(rows=rows, known=st.booleans())
@example(rows=[(1.0, 0.0, 0.04296875), (117.0, 0.0, 1.0), (140.0, 0.0, 0.25)], known=False)
def test_no_table_makes_a_step_much_shorter_than_any_that_was_measured(
    rows: list[tuple[float, float, float]], known: bool
) -> None:
    found = fitted(rows, roofline(MODELS["qwen2.5-7b"], GPUS["h800"], 1) if known else None)
    fastest = min(seconds for _, _, seconds in rows)
    assert found.decode.step_s(1, 0) >= (0.02 if known else 0.05) * fastest * (1 - 1e-9)
    assert found.decode.step_s(1, 0) <= found.decode.step_s(64, 1e5) <= found.decode.step_s(65, 1e5)


def test_what_no_row_tells_is_said_before_anything_runs() -> None:
    measured = {"decode": [(1, 84, 0.018)], "kv_tokens": 40_000, "prefill_tokens_per_s": 1e4, "train_tokens_per_s": 1e3}
    job = Job.of(settings_from({"model": {"name": "measured"}, "costs": measured, "cluster": {"gpus": 4}}))
    assert "a batch of 1 alone" in facts(job) and job.batch_limit == job.settings.rollout.max_running
    assert as_json(job, [])["untold"] == job.costs.untold
    assert not Job.of(settings_from({})).costs.untold


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    capacity=st.integers(600, 4000), most=st.integers(1, 16),
)  # fmt: skip
def test_an_engine_ends_all_that_it_is_given_whatever_its_cache(lengths: list[int], capacity: int, most: int) -> None:
    engine = Engine(Decode(0.001, 0.01, 8, 1e-6), capacity, most, 10_000.0)
    for number, length in enumerate(lengths):
        engine.submit(Request((number, 0), 50, length, 50))
        engine.validate()
    ended, before = [], 0.0
    while engine.owned:
        when = engine.next_event()
        assert before <= when < math.inf
        engine.advance(when)
        ended += engine.settle()
        engine.validate()
        before = when
    assert sorted(ended) == [(n, 0) for n in range(len(lengths))]
    assert engine.generated == pytest.approx(sum(lengths), abs=0.01 * len(lengths))
    assert engine.kv == 0 and engine.busy_s == pytest.approx(engine.now)


def test_what_is_taken_out_keeps_its_tokens_and_what_is_left_goes_faster() -> None:
    engine = Engine(Decode(0.0, 0.01, 1, 0.0), 10_000, 8, 1e9)
    for number in range(2):
        engine.submit(Request((number, 0), 10, 100, 0))
    engine.advance(1.0)  # two at the knee of one: 0.02 s a step
    taken = engine.take((0, 0))
    assert taken.tokens == pytest.approx(60) and taken.remaining == pytest.approx(50)
    assert engine.next_event() == pytest.approx(1.5)


def test_what_waits_while_weights_are_swapped_has_no_cache_any_more() -> None:
    engine = Engine(Decode(0.0, 0.01, 1, 0.0), 10_000, 1, 100.0)
    engine.submit(Request((0, 0), 40, 10, 0))
    engine.submit(Request((1, 0), 60, 10, 0))
    engine.submit(Request((2, 0), 10, 10, 5))
    engine.swap(1.0)
    assert engine.refilled == 100, "what only begins has no cache to lose"
    assert engine.next_event() == pytest.approx(1.0 + 0.4 + 0.1)
    engine.advance(1.5)
    engine.settle()
    assert engine.next_event() == pytest.approx(1.5 + 0.6 + 0.1)


def test_lengths_depend_on_group_sample_and_seed_alone() -> None:
    def lengths(seed: int) -> Lengths:
        return Lengths(samples=4, longest=1000, seed=seed, median=100, sigma=1.0)

    a, b = lengths(1), lengths(1)
    assert a.of(700, 2) == b.of_groups([700])[0, 2]
    assert [a.of(g, 0) for g in range(50)] != [lengths(2).of(g, 0) for g in range(50)]
    drawn = a.of_groups(range(2000))
    assert drawn.min() >= 1 and drawn.max() == 1000 and np.median(drawn) == pytest.approx(100, rel=0.05)


def test_a_trace_is_drawn_from_and_a_bad_one_is_explained(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [5, 50, None, 500]}), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text('{"n": 7}\n{"n": true}\n\n{"n": 9}\n')
    assert read_trace(tmp_path / "t.parquet", "tokens").tolist() == [5, 50, 500]
    recorded = read_trace(tmp_path / "t.jsonl", "n")
    lengths = Lengths(samples=2, longest=8, seed=0, median=1, sigma=1, recorded=recorded)
    assert set(lengths.of_groups(range(100)).ravel().tolist()) == {7, 8}


@pytest.mark.parametrize(
    ("name", "column", "says"),
    [
        ("t.parquet", "no", r"no column 'no'; set lengths\.column to one of tokens, hole"),
        ("t.parquet", "hole", r"has nan in its column 'hole', row 2: .* correct it"),
        ("t.jsonl", "no", r"no positive number in its column 'no', of 3 rows; set lengths\.column"),
        ("t.jsonl", "n", r"has inf in its column 'n', line 3: a length is a finite number; correct it"),
        ("large.jsonl", "n", r"has an integer of 1329 bits in its column 'n', line 1"),
        ("broken.jsonl", "n", r"line 2 is no JSON .*; correct the file"),
        ("t.csv", "n", r"must be a \.parquet or \.jsonl file; convert it"),
        ("absent.jsonl", "n", r"cannot be read: .*; correct the path"),
    ],
)
def test_a_bad_trace_is_refused_with_its_place_and_a_remedy(
    tmp_path: Path, name: str, column: str, says: str
) -> None:  # fmt: skip
    pq.write_table(pa.table({"tokens": [5, 50], "hole": [5.0, math.nan]}), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text('{"n": 7}\n\n{"n": Infinity}\n{"n": 9}\n')
    (tmp_path / "large.jsonl").write_text(f'{{"n": {10**400}}}\n')
    (tmp_path / "broken.jsonl").write_text('{"n": 7}\n{"n": \n')
    with pytest.raises(ConfigError, match=r"lengths\.trace = .*" + says):
        read_trace(tmp_path / name, column)
