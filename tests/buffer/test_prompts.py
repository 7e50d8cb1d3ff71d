"""The prompt pool and the order of drawing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from laminar.buffer.prompts import PromptLimits, PromptPool, fingerprint, locate, order, validate_rows
from laminar.buffer.schema import PROMPTS
from laminar.errors import ConfigError, StoreError

ORDER_0_0 = [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]
ORDER_M3_2 = [4, 9, 8, 7, 0, 6, 3, 1, 5, 2]


def pool_rows(count: int, answer: str = "a") -> pa.Table:
    return validate_rows([{"prompt": f"question {i}", "answer": answer} for i in range(count)])[0]


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    first, second = order(0, 0, 1000), order(0, 1, 1000)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(1000))
    assert first.tolist() != second.tolist() != list(range(1000))
    assert order(1, 0, 1000).tolist() != first.tolist()


def test_the_order_is_fixed_for_ever() -> None:
    """A resumed run must draw on as it began, whatever releases are installed: these numbers never change."""
    assert order(0, 0, 10).tolist() == ORDER_0_0
    assert order(-3, 2, 10).tolist() == ORDER_M3_2
    assert order(1 << 70, 0, 10).tolist() == order(0, 0, 10).tolist(), "seeds count modulo 2^64"


def test_the_order_is_even() -> None:
    firsts = [int(order(seed, epoch, 7)[0]) for seed in range(60) for epoch in range(60)]
    assert all(abs(firsts.count(i) - len(firsts) / 7) < 110 for i in range(7))


def test_a_group_gives_epoch_position_and_prompt() -> None:
    """Case 32: group 10 of 10 prompts is the first of the next epoch. Case 35: after group 3 comes group 4's prompt."""
    drawn = [locate(group, 10, 5) for group in range(30)]
    assert [(e, p) for e, p, _ in drawn] == [(g // 10, g % 10) for g in range(30)]
    for epoch in range(3):
        assert sorted(i for e, _, i in drawn if e == epoch) == list(range(10))
    assert locate(4, 10, 5) == drawn[4]


async def test_a_pool_is_written_once_and_opened_by_others(tmp_path: Path) -> None:
    uri = str(tmp_path / "prompts.lance")
    with pytest.raises(StoreError, match="no prompt pool"):
        await PromptPool.open(uri)
    made = await PromptPool.create(uri, pool_rows(20))
    again = await PromptPool.create(uri, pool_rows(20))
    opened = await PromptPool.open(uri)
    assert made.fingerprint == again.fingerprint == opened.fingerprint
    assert len(opened) == 20
    assert opened.row(7) == {
        "prompt_index": 7, "prompt": "question 7", "answer": "a", "environment": None, "metadata": "{}", "source": None,
    }  # fmt: skip
    with pytest.raises(IndexError, match="beyond the pool's 20"):
        opened.row(20)


async def test_a_changed_pool_is_refused_naming_both_fingerprints(tmp_path: Path) -> None:
    """Case 37: a resume with a changed data set is refused, naming both fingerprints."""
    uri = str(tmp_path / "prompts.lance")
    old = await PromptPool.create(uri, pool_rows(20))
    changed = pool_rows(20, answer="b")
    with pytest.raises(ConfigError, match=rf"{old.fingerprint[:16]}.*{fingerprint(changed)[:16]}"):
        await PromptPool.create(uri, changed)


def test_the_fingerprint_is_of_the_content_alone() -> None:
    rows = pool_rows(50)
    pieces = pa.concat_tables([rows.slice(0, 13), rows.slice(13)])
    assert fingerprint(rows) == fingerprint(pieces)
    assert fingerprint(rows) != fingerprint(rows.slice(0, 49))
    shifted = rows.set_column(1, "prompt", rows["answer"]).set_column(2, "answer", rows["prompt"])
    assert fingerprint(rows) != fingerprint(shifted)


def test_a_pool_with_missing_rows_is_refused() -> None:
    with pytest.raises(StoreError, match="missing or doubled"):
        PromptPool(pool_rows(5).slice(1))
    with pytest.raises(ConfigError, match="empty"):
        PromptPool(PROMPTS.empty_table())


def test_unusable_rows_are_counted_and_named() -> None:
    raw = [
        {"prompt": "fine", "metadata": {"level": 1}},
        {"prompt": None},
        {"answer": "no prompt column"},
        {"prompt": "  \n"},
        {"prompt": []},
        {"prompt": "fine", "answer": "another"},
        {"prompt": b"caf\xe9"},
        {"prompt": "lone \ud800 surrogate"},
        {"prompt": "x" * 101},
        {"prompt": "é" * 51},
        {"prompt": "bad metadata", "metadata": "{"},
        {"prompt": "list metadata", "metadata": "[]"},
        {"prompt": [{"role": "user", "content": "messages ✓"}]},
        {"prompt": "café".encode()},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": ["no message"]},
    ]
    rows, report = validate_rows(raw, PromptLimits(max_bytes=100))
    assert rows["prompt"].to_pylist() == ["fine", '[{"role": "user", "content": "messages ✓"}]', "café"]
    assert rows["prompt_index"].to_pylist() == [0, 1, 2]
    assert rows["metadata"].to_pylist() == ['{"level": 1}', "{}", "{}"]
    assert report.rows == 16 and report.kept == 3
    assert report.dropped == {
        "without a prompt": 2,
        "empty": 2,
        "the same as an earlier prompt": 1,
        "not UTF-8": 2,
        "of more than 100 bytes": 2,
        "with metadata that are no JSON object": 2,
        "with a message that has no role or no text": 2,
    }
    told = report.describe()
    assert "3 of 16 prompts are usable; left out: 2 without a prompt (row 1: None; row 2: None), 2 empty (row 3" in told


def test_of_many_bad_rows_the_first_are_shown() -> None:
    _, report = validate_rows([{"prompt": "good"}, *({"prompt": ""} for _ in range(1000))])
    assert report.dropped == {"empty": 1000}
    assert report.examples["empty"] == ["row 1: ''", "row 2: ''", "row 3: ''"]


def test_an_empty_pool_is_a_config_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match="0 of 2 prompts are usable; left out: 2 empty"):
        validate_rows([{"prompt": ""}, {"prompt": " "}])
    with pytest.raises(ConfigError, match="0 of 0"):
        validate_rows([])
