"""Writes docs/config.md and docs/cluster.md from the docstrings of their models: `python docs/generate_config.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from laminar.config import FROZEN, Config
from laminar.simulator.scale.settings import Settings

PAGE, CLUSTER_PAGE = Path(__file__).with_name("config.md"), Path(__file__).with_name("cluster.md")
HEAD = """\
# The config

<!-- Written by docs/generate_config.py; change the docstrings in laminar/config.py instead. -->

A run is described by one TOML file: a table for each section below. Only `model.path` has no default. An unknown key,
a wrong type or values that contradict each other are refused before anything starts, with the near name or the limit
in the message; `laminar run config.toml --dry-run` checks all of it. `--set section.key=value` overrides one value.

A value marked *frozen* may not change when a run is resumed, nor may the prompts, the tokenizer, its chat template or
the model's files. All others may; each change is recorded in `run.json` with the step at which it took effect.
"""
CLUSTER_HEAD = """\
# cluster.toml

<!-- Written by docs/generate_config.py; change the docstrings in laminar/simulator/scale/settings.py instead. -->

What `laminar simulate cluster.toml` reads: a table for each section below, each with a default for every key; an
unknown key is refused with the near name. [examples/cluster.toml](../examples/cluster.toml) has those that one
changes. `--set section.key=value` overrides one value. """
BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
WORDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def kind(annotation: Any) -> str:
    """A type as a reader of TOML knows it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        return " or ".join(kind(a) for a in arguments if a is not NoneType)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin is list:
        return f"array of {kind(arguments[0])}"
    if origin is tuple:
        return f"array of {len(arguments)} {kind(arguments[0])}s"
    return "table" if origin is dict else WORDS[annotation]


def bounded(field: FieldInfo) -> str:
    limits = (f"{sign} {getattr(m, name):g}" for name, sign in BOUNDS for m in field.metadata if hasattr(m, name))
    return ", ".join([kind(field.annotation), *limits])


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "absent" if value is None else f"`{json.dumps(value)}`"


def rows(section: str, model: type[BaseModel], frozen_keys: tuple[str, ...]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        meaning = " ".join((field.description or "").split())
        frozen = " *Frozen.*" if f"{section}.{name}" in frozen_keys and "Frozen" not in meaning else ""
        cells = (f"`{name}`", bounded(field), default(field), meaning.replace("Frozen", "*Frozen*") + frozen)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(head: str = HEAD, tree: type[BaseModel] = Config) -> str:
    parts = [head]
    frozen = FROZEN if tree is Config else ()
    for section, field in tree.model_fields.items():
        model: Any = field.annotation
        heading = f"## [{section}]\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        parts.append(heading + "\n".join(rows(section, model, frozen)) + "\n")
    return "\n".join(parts)


def cluster_page() -> str:
    return page(CLUSTER_HEAD, Settings)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CLUSTER_PAGE.write_text(cluster_page(), encoding="utf-8")
