"""Rows of the prompt pool as environments take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from laminar.workers.environments.base import Prompt


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    return Prompt(
        prompt_index=int(row["prompt_index"]),
        prompt=row["prompt"],
        answer=row["answer"] or "",
        metadata=json.loads(row["metadata"] or "{}"),
    )
