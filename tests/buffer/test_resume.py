"""What a resume may change, and how a refusal names it."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.buffer.manifest import Fingerprints, RunFile, compare_for_resume
from laminar.errors import ConfigError

OLD = {"run": {"name": "a", "seed": 0}, "prompts": {"seed": 1, "size": 8}, "trainer": {"learning_rate": 0.1}}


def compared(changes: dict[str, dict[str, Any]], *, prompts: str = "p") -> list[tuple[str, Any, Any]]:
    prints = Fingerprints(model="m", tokenizer="t", template="c", prompts="p", held_out="h")
    file = RunFile(run="a", created_at_us=0, config=OLD, model_folder="", prompts=8, held_out=0, fingerprints=prints)
    new = {section: {**values, **changes.get(section, {})} for section, values in OLD.items()}
    found = compare_for_resume(file, new, prints.model_copy(update={"prompts": prompts}), ("run.seed",), step=3)
    return [(change.key, change.before, change.after) for change in found]


def test_free_values_may_change_and_are_told() -> None:
    assert compared({"trainer": {"learning_rate": 0.2}}) == [("trainer.learning_rate", 0.1, 0.2)]


def test_frozen_values_may_not() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed: the run has 0, this configuration has 5"):
        compared({"run": {"seed": 5}})


def test_settings_of_the_same_prompts_may_change() -> None:
    assert compared({"prompts": {"size": 9}}) == []


def test_other_prompts_are_refused_with_the_settings_that_may_be_why() -> None:
    with pytest.raises(ConfigError, match=r"(?s)prompts: the run has p….*prompts.seed: the run has 1, this .* has 2"):
        compared({"prompts": {"seed": 2}}, prompts="q")
