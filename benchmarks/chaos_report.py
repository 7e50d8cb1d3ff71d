"""What real faults cost: count, median and worst recovery time by kind.

    LAMINAR_CHAOS_LOG=chaos.jsonl python -m pytest -m chaos
    python benchmarks/chaos_report.py chaos.jsonl

Each line of the file is one fault, or several at once (`faults`), of one `kind`; `recovery_s` is the time in seconds
from the last of them until its work was with somebody else, or was done again.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path


def report(lines: list[dict]) -> str:
    """A table in Markdown; the last row counts all faults."""
    kinds: dict[str, list[dict]] = defaultdict(list)
    for line in lines:
        kinds[line["kind"]].append(line)
    rows = ["| kind | faults | recoveries | median s | worst s |", "|---|---|---|---|---|"]
    for kind, found in sorted(kinds.items()):
        seconds = [line["recovery_s"] for line in found]
        faults = sum(line["faults"] for line in found)
        rows.append(f"| {kind} | {faults} | {len(found)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    rows.append(f"| all | {sum(line['faults'] for line in lines)} | {len(lines)} | | |")
    return "\n".join(rows)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: chaos_report.py FILE  (the file that LAMINAR_CHAOS_LOG named)")
    try:
        text = Path(sys.argv[1]).read_text(encoding="utf-8")
    except OSError as e:
        sys.exit(f"{sys.argv[1]} cannot be read: {e.strerror}; it is written by tests that see LAMINAR_CHAOS_LOG")
    lines = [json.loads(line) for line in text.splitlines()]
    if not lines:
        sys.exit(f"{sys.argv[1]} records no fault")
    print(report(lines))


if __name__ == "__main__":
    main()
