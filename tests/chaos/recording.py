"""What a fault cost, one line of JSON each, in the file that LAMINAR_CHAOS_LOG names."""

from __future__ import annotations

import json
import os
import time


class Recorder:
    """Without LAMINAR_CHAOS_LOG it only keeps what it is told. `benchmarks/chaos_report.py` reads the file."""

    def __init__(self, test: str) -> None:
        self.test = test
        self.lines: list[dict[str, object]] = []

    def fault(self, kind: str, recovery_s: float, *, faults: int = 1, **more: object) -> None:
        """`recovery_s`: seconds from the (last) fault until its work was with somebody else, or done again."""
        line = {"kind": kind, "recovery_s": round(recovery_s, 3), "faults": faults, "test": self.test,
                "at": time.time(), **more}  # fmt: skip
        self.lines.append(line)
        if path := os.environ.get("LAMINAR_CHAOS_LOG"):
            with open(path, "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
