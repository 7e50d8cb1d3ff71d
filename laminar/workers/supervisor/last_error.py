"""What a process that died said last, out of its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

READ_BYTES = 64 << 10
"""Of the end of a log: an error and what it is wrapped in."""
VERDICT = "error: "
"""How the command line says what ended it; what is written after it is of the process's clearing up."""
ERROR_LINE = re.compile(r"\w[\w.]*(Error|Exception|Exit|Interrupt|Failure)(: |$)|Fatal Python error: ")
LOGGED_LINE = re.compile(r"\S+ +(ERROR|CRITICAL) +")
"""As `configure_logging` has it: time, level, message."""
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
    """What says why a process ended, at most 300 characters: the last `error: …`, else the last `SomeError: …` or
    message of level ERROR or CRITICAL; empty if there is none, for any other line need not have to do with it."""
    found = ""
    for line in (line.strip() for line in reversed(lines)):
        if line.startswith(VERDICT):
            found = line.removeprefix(VERDICT)
            break
        if not found and (ERROR_LINE.match(line) or LOGGED_LINE.match(line)):
            found = LOGGED_LINE.sub("", line, count=1)
    return found if len(found) <= LONGEST else found[: LONGEST - 1] + "…"
