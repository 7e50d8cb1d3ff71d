"""README.md and the examples are run, not believed: each config, code block, command and link in them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from laminar.cli import app
from laminar.config import Config, EnvironmentConfig, RewardConfig, config_from, load_config
from laminar.workers.environments.base import Prompt, Transcript
from laminar.workers.environments.host import EnvironmentHost
from laminar.workers.environments.sources import load_prompts

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("laminar ")]


def code(name: str) -> str:
    (block,) = [block for block in blocks("python") if block.startswith(f"# {name}\n")]
    return block


def config(containing: str) -> Config:
    (block,) = [block for block in blocks("toml") if containing in block]
    parsed: dict[str, Any] = {"model": {"path": "tiny-reverse"}, **tomllib.loads(block)}
    return config_from(parsed)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


CONFIGS = sorted(set((ROOT / "examples").glob("*.toml")) - {ROOT / "examples" / "cluster.toml"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_a_valid_config_named_as_its_file(path: Path) -> None:
    assert load_config(path).run.name == path.stem


@pytest.mark.parametrize("line", commands())
def test_a_documented_command_exists_with_its_options(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    path = words[: 2 if words[0] in ("experience", "worker") else 1]
    help_text = CliRunner().invoke(app, [*path, "--help"], catch_exceptions=False, env={"COLUMNS": "200"})
    assert help_text.exit_code == 0, help_text.output
    for option in [word for word in words if word.startswith("--")]:
        assert option in help_text.output


def test_looking_commands_and_tools_work_on_a_store(
    make_store: Callable[..., Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store("quickstart")
    for line in commands():
        words = shlex.split(line, comments=True)[1:]
        if words[0] in ("status", "experience", "plot"):
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            assert result.exit_code == 0 and result.output.strip(), line
    (source,) = [block for block in blocks("python") if "import duckdb" in block]
    exec(compile(source, str(README), "exec"), {})


async def test_the_documented_reward_scores(here: Path) -> None:
    (here / "my_rewards.py").write_text(code("my_rewards.py"))
    host = EnvironmentHost(EnvironmentConfig(), config("my_rewards").reward, workers=1)
    await host.start()
    try:
        prompt = Prompt(0, "2 + 2 = ?", answer="4")
        right = await host.score(prompt, Transcript(replies=["4"], messages=[], finish_reason="stop"))
        long = await host.score(prompt, Transcript(replies=["it is 4, I think"], messages=[], finish_reason="stop"))
    finally:
        await host.close()
    assert (right.reward, right.parts) == (1.0, {"right": 1.0, "short": 1.0})
    assert (long.reward, long.parts) == (0.0, {"right": 1.0, "short": 0.0})


async def test_the_documented_environment_plays(here: Path) -> None:
    (here / "my_game.py").write_text(code("my_game.py"))
    (here / "numbers.jsonl").write_text(json.dumps({"prompt": "a number", "answer": "7"}) + "\n")
    game = config("my_game")
    (row,) = load_prompts(game.prompts, game.evaluation).train
    prompt = Prompt(0, row["prompt"], answer=row["answer"])
    host = EnvironmentHost(game.environment, RewardConfig(), workers=1)
    await host.start()
    try:
        first = await host.reset(prompt)
        low = await host.step(prompt, first.state, "3")
        high = await host.step(prompt, low.state, "12")
        end = await host.step(prompt, high.state, "7")
        score = await host.score(prompt, Transcript(replies=["3", "12", "7"], messages=[], finish_reason="stop"))
    finally:
        await host.close()
    assert [turn.messages[0]["content"] for turn in (low, high)] == ["higher", "lower"]
    assert high.state == "2" and end.done and score.reward == pytest.approx(1 / 3)


def test_the_cluster_config_is_valid() -> None:
    cluster = config("/shared/runs")
    assert cluster.store_root == "/shared/runs/my-run" and len(cluster.coordination.endpoints) == 3
    secured = config("s3://")
    assert secured.flush_interval == 5.0 and secured.coordination.access().ca == "/etc/laminar/ca.pem"


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists() and (not anchor or anchor in anchors_of(there)), target


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:laminar|tests|scripts|docs|examples|benchmarks)/[\w./-]*)`", text)
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists(), path
