"""Differences need two checkpoints; where there are fewer, the benchmark says how to make them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import delta
import pytest

from laminar.config import load_config_with

ROOT = Path(delta.__file__).parent.parent


def make(folder: Path, *versions: int) -> list[Path]:
    steps = [folder / f"step-{version:09d}" for version in versions]
    for step in steps:
        step.mkdir()
        (step / "checkpoint.json").touch()
    return steps


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_are_an_error_that_says_how_many_there_are_and_what_makes_more(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, *range(count))
    (tmp_path / "step-000000009").mkdir()  # one that is not complete
    monkeypatch.setattr("sys.argv", ["delta.py", "--checkpoints", str(tmp_path)])
    monkeypatch.setattr(delta, "tidy_when_told_to_end", lambda: None)
    with pytest.raises(SystemExit) as ended:
        delta.main()
    said = str(ended.value.code)
    assert re.search(rf"has {count} checkpoints?, a difference needs at least 2", said) and delta.MAKING in said
    assert capsys.readouterr().out == "", "no header of a table that stays empty"


def test_two_are_enough_and_come_in_their_order(tmp_path: Path) -> None:
    later, earlier = make(tmp_path, 11, 2)
    assert delta.checkpoints(tmp_path) == [earlier, later]


def test_the_command_that_makes_them_keeps_one_of_each_step() -> None:
    program, command, path, *options = shlex.split(delta.MAKING.replace("\\\n", ""))
    assert (program, command) == ("laminar", "run") and options[::2] == ["--set"] * (len(options) // 2)
    config, _ = load_config_with(ROOT / path, options[1::2])
    assert config.trainer.checkpoint_every == 1
    assert config.trainer.keep_checkpoints >= config.run.max_steps >= 2
    assert f"runs/{config.run.name}/checkpoints" in str(delta.__doc__)
