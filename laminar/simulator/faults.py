"""What goes wrong in one simulated run, and when: drawn from a seed, so that a failing run can be run again."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    KILL = "kill"
    CRASH_AT_CALL = "crash at a call"
    STOP = "stop and continue"
    STOP_AT_CALL = "stop at a call, continue"
    TERMINATE = "terminate"
    PARTITION = "cut off from etcd"
    NETWORK = "replies lost or late"
    LEASE = "lease lost"
    ETCD_RESTART = "etcd restart"
    COMPACTION = "etcd compaction"
    DISK_FULL = "disk full"
    DISK_ERRORS = "storage errors"
    DISK_SLOW = "slow storage"
    POWER_CUT = "power cut"
    BIT_FLIP = "bit flip"
    REPLY_OF_COMMIT = "reply of a commit lost"
    COMMIT_LATE = "commit lands late"
    COMMIT_FAILS = "commit fails"
    REWARD_HANGS = "reward hangs"
    REWARD_RAISES = "reward raises"
    ENGINE_BREAKS = "engine breaks"
    REST = "found slow"


WEIGHTS: dict[Kind, float] = {
    Kind.KILL: 3,
    Kind.CRASH_AT_CALL: 8,
    Kind.STOP: 2,
    Kind.STOP_AT_CALL: 5,
    Kind.TERMINATE: 1.5,
    Kind.PARTITION: 3,
    Kind.NETWORK: 3,
    Kind.LEASE: 2,
    Kind.ETCD_RESTART: 2,
    Kind.COMPACTION: 1,
    Kind.DISK_FULL: 1,
    Kind.DISK_ERRORS: 2,
    Kind.DISK_SLOW: 1,
    Kind.POWER_CUT: 1,
    Kind.BIT_FLIP: 1,
    Kind.REPLY_OF_COMMIT: 2,
    Kind.COMMIT_FAILS: 1,
    Kind.REWARD_HANGS: 1,
    Kind.REWARD_RAISES: 1,
    Kind.ENGINE_BREAKS: 1,
    Kind.REST: 2,
}
"""A commit that lands late is every second one whose reply is lost."""
PROCESS_KINDS = ("rollout", "trainer", "relay", "committer")


@dataclass(frozen=True)
class Fault:
    """At `at` virtual seconds. `target` is the kind of process hit, where one is; `choice`, in [0, 1), picks among
    those of the kind and whatever else is to be picked; `duration` in seconds; `calls` as in SimProcess.crash."""

    at: float
    kind: Kind
    target: str
    choice: float
    duration: float
    calls: int
    after: bool


NEVER_READY = 1_000
"""Groups, more than there are: they never stop the drawing."""


@dataclass(frozen=True)
class Plan:
    """`rollouts`, `trainers`, `relays`: processes of each kind, kept running by a supervisor. `long_tails`: some
    trajectories are many times as long as most."""

    seed: int
    rollouts: int
    trainers: int
    relays: int
    max_turns: int
    max_staleness: int | None
    on_version_lost: str
    fsync: bool
    faults: tuple[Fault, ...]
    update: str = "drain"
    repack_interval: float = 0.0
    long_tails: bool = False
    max_ready_groups: int = 0


def draw_plan(seed: int, *, window_s: float, lease_s: float, without: frozenset[Kind] = frozenset()) -> Plan:
    """A cluster and 1 to 12 faults within `window_s` seconds; pauses last up to three leases of `lease_s`."""
    source = random.Random(f"plan/{seed}")
    kinds = [k for k in WEIGHTS if k not in without]
    faults = []
    for _ in range(source.randint(1, 12)):
        kind = source.choices(kinds, [WEIGHTS[k] for k in kinds])[0]
        fault = Fault(
            at=round(source.uniform(1.0, window_s), 3),
            kind=kind,
            target=source.choices(PROCESS_KINDS, (3, 3, 2, 2))[0],
            choice=source.random(),
            duration=round(source.uniform(0.2, 3.0) * lease_s, 3),
            calls=source.randint(1, 60),
            after=source.random() < 0.5,
        )
        if kind is Kind.REPLY_OF_COMMIT and fault.after and Kind.COMMIT_LATE not in without:
            fault = replace(fault, kind=Kind.COMMIT_LATE)
        faults.append(fault)
    shape = random.Random(f"shape/{seed}")
    long_tails = shape.random() < 0.5
    return Plan(
        seed=seed,
        rollouts=shape.choice((3, 3, 4)) if long_tails else source.choice((1, 2, 2, 3)),
        trainers=source.choice((1, 1, 2)),
        relays=source.choice((1, 1, 2)),
        max_turns=source.choice((1, 1, 2)),
        max_staleness=source.choice((None, None, 0, 1)),
        on_version_lost=source.choice(("continue", "restart")),
        fsync=source.random() < 0.5,
        faults=tuple(sorted(faults, key=lambda f: f.at)),
        update="interrupt" if shape.random() < 0.15 else "drain",
        repack_interval=shape.choice((0.0, 0.7, 2.0, 5.0)) if not long_tails else shape.choice((0.5, 1.0)),
        long_tails=long_tails,
        max_ready_groups=shape.choice((0, NEVER_READY)),
    )
