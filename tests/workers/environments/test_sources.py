"""Prompt sources: held-out prompts are disjoint from training by content; what is left out is counted and named."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar.buffer.schema import PROMPTS
from laminar.config import EvaluationConfig, PromptsConfig
from laminar.errors import ConfigError
from laminar.workers.environments.base import Prompt, Transcript
from laminar.workers.environments.rewards import build_reward
from laminar.workers.environments.single_turn import prompt_messages
from laminar.workers.environments.sources import PromptSet, Row, content_key, load_prompts

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def load(evaluation: dict[str, Any] | None = None, **config: Any) -> PromptSet:
    return load_prompts(PromptsConfig(**config), EvaluationConfig(**(evaluation or {})))


def assert_disjoint_and_distinct(prompts: PromptSet) -> None:
    keys = [content_key(row) for row in [*prompts.train, *prompts.held_out]]
    assert len(keys) == len(set(keys))
    rows = [{"prompt_index": i, **row} for i, row in enumerate(prompts.train)]
    assert pa.Table.from_pylist(rows, schema=PROMPTS).num_rows == len(prompts.train)


def prompt(row: Row) -> Prompt:
    return Prompt(0, row["prompt"], row["answer"], json.loads(row["metadata"]))


def test_reasoning_gym_holds_out_by_content() -> None:
    prompts = load({"size": 64}, dataset="chain_sum", options=DIGITS, size=1000)
    assert_disjoint_and_distinct(prompts)
    assert len(prompts.held_out) == 64 and len(prompts.train) == 200 - 64
    assert "200 distinct" in str(prompts.report)
    assert "prompts.size = 1000, but the source has only 136" in str(prompts.report)


def test_neighbouring_seeds_hold_out_by_content() -> None:
    """Seeds n and n+1 of reasoning-gym share all problems but one."""
    prompts = load({"size": 20, "seed": 1}, dataset="chain_sum", options={"min_terms": 4}, size=50, seed=0)
    assert_disjoint_and_distinct(prompts)
    assert (len(prompts.train), len(prompts.held_out)) == (50, 20)


def test_reasoning_gym_rows_score_their_own_answers() -> None:
    reward = build_reward("reasoning-gym", {}, timeout=1)
    for name in ("chain_sum", "gcd", "simple_equations", "leg_counting", "letter_counting"):
        for row in load(dataset=name, size=3).train:
            assert row["source"] == f"reasoning-gym:{name}"
            assert reward(prompt(row), Transcript([f"It is\n{row['answer']}"], [], "stop")).reward == 1.0


def test_the_same_config_gives_the_same_prompts() -> None:
    first, again = (load({"size": 5}, dataset="gcd", size=20) for _ in range(2))
    assert first.train == again.train and first.held_out == again.held_out
    assert load({"size": 5}, dataset="gcd", size=20, seed=5_000_000).train != first.train


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"dataset": "chain_sun"}, "did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "options": {"min_trems": 2}}, "min_trems"),
        ({"dataset": "chain_sum", "options": {"seed": 2}}, "set by prompts.seed"),
        ({"dataset": "rearc"}, "do not survive JSON"),
        ({"source": "file"}, "needs prompts.dataset"),
        ({"source": "file", "dataset": "prompts.csv"}, "only .jsonl and .parquet"),
        ({"source": "file", "dataset": "no/such.jsonl"}, "no/such.jsonl cannot be read"),
        ({"source": "huggingface"}, "prompts.dataset|pip install"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(size=2, **config)


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"200 of them held out: lower evaluation\.size"):
        load({"size": 500}, dataset="chain_sum", options=DIGITS)


def test_reverse_asks_for_words_of_the_tiny_fixture() -> None:
    prompts = load({"size": 30}, source="reverse", size=200)
    assert_disjoint_and_distinct(prompts)
    assert (len(prompts.train), len(prompts.held_out)) == (200, 30)
    for row in prompts.train:
        verb, word = row["prompt"].split()
        assert verb == "reverse" and row["answer"] == word[::-1]
        assert 3 <= len(word) <= 5 and set(word) <= set("abcdefghij")


def test_a_jsonl_file_with_bad_lines_names_them(tmp_path: Path) -> None:
    """Bad rows: null, empty, duplicate, not UTF-8, oversize, and lines that are no JSON."""
    lines = [
        b'{"prompt": "a", "answer": 1, "level": 3, "metadata": {"k": "v"}}',
        b'{"prompt": "b"',
        b'{"prompt": null}',
        b'{"prompt": "  "}',
        b'{"prompt": "a"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'["c"]',
        json.dumps({"prompt": "x" * (1 << 21)}).encode(),
        b"",
        b'{"prompt": [{"role": "user", "content": "d"}], "answer": null}',
    ]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(lines))
    prompts = load(source="file", dataset=str(tmp_path / "prompts.jsonl"))
    first, second = prompts.train
    assert first["prompt"] == "a" and first["answer"] == "1"
    assert json.loads(first["metadata"]) == {"level": 3, "k": "v"}
    assert json.loads(second["prompt"]) == [{"role": "user", "content": "d"}] and second["answer"] == ""
    report = str(prompts.report)
    assert "2 distinct of 10 drawn; left out: " in report
    assert "1 not JSON (line 2)" in report and "1 not a JSON object (line 8)" in report
    assert "2 not UTF-8 (line 6; line 7" in report and "1 without a prompt (line 3: None)" in report
    assert "1 the same as an earlier prompt (line 5: 'a')" in report, "one numbering for whatever is wrong"
    assert sum(prompts.report.left_out.values()) == 8


def test_a_byte_order_mark_belongs_to_no_row(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    prompts = load(source="file", dataset=str(tmp_path / "prompts.jsonl"))
    assert [row["prompt"] for row in prompts.train] == ["a", "b"] and not prompts.report.left_out


def test_tasks_of_an_environment_may_have_the_same_words(tmp_path: Path) -> None:
    rows = [{"prompt": "Guess the number.", "answer": n % 4, "secret": n % 20} for n in range(30)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config, held_out = PromptsConfig(source="file", dataset=str(path)), EvaluationConfig(size=5)
    played = load_prompts(config, held_out, environment=True)
    secrets = [[json.loads(row["metadata"])["secret"] for row in part] for part in (played.train, played.held_out)]
    assert (len(secrets[0]), len(secrets[1])) == (15, 5) and {*secrets[0], *secrets[1]} == set(range(20))
    assert played.report.left_out == {"the same as an earlier prompt": 10}
    with pytest.raises(ConfigError, match="no prompt is left for training"):
        load_prompts(config, held_out)


def test_held_out_rows_of_a_file_are_chosen_by_content(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "solution": str(i)} for i in range(50)]
    paths = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(order), path)
        paths.append(path)
    sets = [
        load({"size": 10}, source="file", dataset=str(p), prompt_column="question", answer_column="solution", size=30)
        for p in paths
    ]
    for prompts in sets:
        assert_disjoint_and_distinct(prompts)
        assert (len(prompts.train), len(prompts.held_out)) == (30, 10)
    assert {r["prompt"] for r in sets[0].held_out} == {r["prompt"] for r in sets[1].held_out}
    assert sets[0].train[0]["answer"] == sets[0].train[0]["prompt"][1:]


def test_a_missing_column_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "q", "id": 1}\n')
    with pytest.raises(ConfigError, match=r"no column 'prompt'.*'question', 'id'"):
        load(source="file", dataset=str(path))
    path.write_text("not json\n")
    with pytest.raises(ConfigError, match=r"before that, left out: 1 not JSON \(line 1\)"):
        load(source="file", dataset=str(path))


def test_prompts_that_the_reward_could_only_fail_on_are_left_out_and_named(tmp_path: Path) -> None:
    """Case 17, seen before the start: a reward that raises for each prompt would end the run with its error later."""
    path = tmp_path / "prompts.jsonl"
    answers = ['"a"', "null", '""', '" "', "7", '""']
    path.write_text("".join(f'{{"prompt": "q{i}", "answer": {a}}}\n' for i, a in enumerate(answers)))

    def scored_by(reward: str, **config: Any) -> PromptSet:
        from_file = PromptsConfig(source="file", dataset=str(path), **config)
        return load_prompts(from_file, EvaluationConfig(), reward=reward)

    prompts = scored_by("exact")
    assert [row["answer"] for row in prompts.train] == ["a", "7"]
    assert "4 without an answer, which reward.name = 'exact' needs" in str(prompts.report)
    assert "(line 2; line 3; line 4; …)" in str(prompts.report)
    assert len(scored_by("my_rewards:score").train) == 6
    with pytest.raises(ConfigError, match=r"6 without an answer.*prompts\.answer_column = 'solution'"):
        scored_by("exact", answer_column="solution")
    with pytest.raises(ConfigError, match=r"6 without the problem that reward\.name = 'reasoning-gym' scores"):
        scored_by("reasoning-gym")
    with pytest.raises(ConfigError, match="reverse has prompts without the problem that"):
        load_prompts(PromptsConfig(source="reverse", size=3), EvaluationConfig(), reward="reasoning-gym")


def test_rows_of_a_table_are_numbered_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": ""}]), path)
    assert "1 empty (row 1: '')" in str(load(source="file", dataset=str(path)).report)


def test_the_system_message_is_put_before_plain_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "[1, 2] sum?"}\n{"prompt": [{"role": "user", "content": "hi"}]}\n')
    plain, messages = load(source="file", dataset=str(path), system="Be brief.").train
    assert prompt_messages(prompt(plain)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "[1, 2] sum?"},
    ]
    assert prompt_messages(prompt(messages)) == [{"role": "user", "content": "hi"}]


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("datasets", "reasoning_gym"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'laminar\[huggingface\]'"):
        load(source="huggingface", dataset="x")
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        load(dataset="chain_sum")
