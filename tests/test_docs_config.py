"""docs/config.md says what laminar/config.py says."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.config import Config

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def page() -> str:
    generate: Callable[[], str] = runpy.run_path(str(DOCS / "generate_config.py"))["page"]
    return generate()


def test_the_page_is_up_to_date(page: str) -> None:
    assert (DOCS / "config.md").read_text(encoding="utf-8") == page, "run: .venv/bin/python docs/generate_config.py"


def test_the_page_of_the_simulated_cluster_is_up_to_date() -> None:
    generate: Callable[[], str] = runpy.run_path(str(DOCS / "generate_config.py"))["cluster_page"]
    assert (DOCS / "cluster.md").read_text(encoding="utf-8") == generate(), "run: python docs/generate_config.py"


def test_every_key_has_a_line_that_says_what_it_means(page: str) -> None:
    for section, field in Config.model_fields.items():
        lines = page.split(f"## [{section}]\n")[1].split("\n## ")[0].splitlines()
        for key in field.annotation.model_fields:  # type: ignore[union-attr]
            (line,) = [line for line in lines if line.startswith(f"| `{key}` |")]
            meaning = line.removesuffix(" |").rsplit(" | ", 1)[1]
            assert len(meaning) > 10, f"{section}.{key} has no docstring"
