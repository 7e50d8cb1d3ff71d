"""What a process that died said last, out of its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

READ_BYTES = 64 << 10
"""Of the end of a log: an error and what it is wrapped in."""
ERROR_LINE = re.compile(r"error: |\w[\w.]*(Error|Exception|Exit|Interrupt|Failure)(: |$)|Fatal Python error: ")
LONGEST = 300


def lines_since(path: Path, start: int = 0) -> list[str]:
    """The lines of a log from byte `start` on, the last 64 KiB of them; none if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(min(size, max(start, size - READ_BYTES)))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def last_error(lines: Sequence[str]) -> str:
    """The line that says why a process ended, at most 300 characters: the last `error: …` or `SomeError: …`, else the
    last line that is not empty; empty if there is none."""
    said = [line.strip() for line in lines if line.strip()]
    found = next((line for line in reversed(said) if ERROR_LINE.match(line)), said[-1] if said else "")
    found = found.removeprefix("error: ")
    return found if len(found) <= LONGEST else found[: LONGEST - 1] + "…"
