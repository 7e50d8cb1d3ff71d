"""How long repairs of a broadcast take, over the whole matrix of faults, in the deterministic simulation.

    python benchmarks/relay_faults.py --seeds 0..2     # each seed: all 352 cases of who, when, how, transport, faults

Six real relays on simulated links of 400 kB/s, 40 chunks: a broadcast without faults takes half a second. Printed for
each kind of fault: cases, how many broke (each is named, with its story), repairs, and virtual seconds: from knowing of
the fault to the next chunk (median, 99th percentile, longest), and until every living relay had the version (median,
longest). A relay that was itself stopped or cut off repairs nothing: its own wait until it was back is no repair, and
counts in the last two columns only; how many were left out so is said below the table. Where a relay that alone had the
bytes is away, the rest can only wait for it; where a host falls silent, 2 s pass until that is known.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

from laminar.simulator.broadcast_cases import Report, Who, cases
from laminar.simulator.broadcasts import broadcast
from laminar.simulator.seeds import parse_seeds


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def row(name: str, reports: list[Report]) -> str:
    repairs = [repair.seconds for report in reports for repair in report.gone_round]
    took = [report.broadcast_s for report in reports]
    broken = sum(bool(report.problems) for report in reports)
    return (
        f"{name:38} {len(reports):6} {broken:6} {len(repairs):8} {quantile(repairs, 0.5):8.3f} "
        f"{quantile(repairs, 0.99):8.3f} {max(repairs, default=0.0):8.3f} {quantile(took, 0.5):8.2f} {max(took):8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0", help="a number, or a range A..B with both ends")
    arguments = parser.parse_args()
    by_fault: dict[tuple[str, str], list[Report]] = defaultdict(list)
    failed = []
    for seed in parse_seeds(arguments.seeds):
        for case in cases(seed):
            report = broadcast(case)
            by_fault[case.who.value, case.how.value].append(report)
            if report.problems:
                failed.append(report)
                print("\n  ".join([str(case), *report.problems, *report.story]), flush=True)
    print(
        f"{'who, how':38} {'cases':>6} {'broken':>6} {'repairs':>8} {'median':>8} {'p99':>8} {'longest':>8} "
        f"{'all have':>8} {'longest':>8}"
    )
    for (who, how), reports in by_fault.items():
        print(row(f"{who}, {how}", reports))
    every = [report for reports in by_fault.values() for report in reports]
    for who in Who:
        print(row(f"all: {who.value}", [report for report in every if report.case.who is who]))
    waits = sum(len(report.repairs) - len(report.gone_round) for report in every)
    print(f"not counted as repairs: {waits} waits of relays that were stopped or cut off themselves")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
