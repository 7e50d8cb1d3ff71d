"""The end of a run in one page: what was learnt, what became of every group, where it lies, what to type next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from laminar.buffer.records import BatchDecision
from laminar.workers.viewing.display import number
from laminar.workers.viewing.fates import decisions
from laminar.workers.viewing.inspect import StoreView
from laminar.workers.viewing.status import StepRow, mean, step_rows


@dataclass(frozen=True)
class Fate:
    """What became of some groups: trained, or retired with a reason. Lengths are in response tokens a trajectory."""

    name: str
    groups: int
    trajectories: int
    mean_tokens: float | None
    longest_tokens: int | None


@dataclass(frozen=True)
class Evaluated:
    """Held-out prompts under one pinned version. `greedy` and `average` (avg@k over `samples` at the training
    temperature) are mean rewards, `passed` (pass@k) the share of prompts with a sample of reward 1."""

    version: int
    prompts: int
    samples: int
    greedy: float | None
    average: float | None
    passed: float | None


@dataclass(frozen=True)
class Summary:
    """`rewards` has the mean reward of each step that has one, in order; `state` is done, failed or stopped."""

    run: str
    store: str
    state: str
    reason: str
    max_steps: int
    steps: Sequence[StepRow]
    fates: Sequence[Fate]
    statuses: dict[str, int]
    evaluations: Sequence[Evaluated] = ()

    @property
    def rewards(self) -> list[float]:
        return [row.reward for row in self.steps if row.reward is not None]


def collect(store: StoreView, *, state: str, reason: str = "") -> Summary:
    """Read the summary from the store's tables and the copies of the decisions. Blocks."""
    counted = store.query("select status, count(*) as n from experience group by status order by n desc").to_pylist()
    return Summary(
        run=store.run.run,
        store=store.root,
        state=state,
        reason=reason,
        max_steps=int(store.run.config.get("run", {}).get("max_steps", 0)),
        steps=step_rows(store),
        fates=_fates(store, decisions(store)),
        statuses={row["status"]: row["n"] for row in counted},
        evaluations=evaluations(store),
    )


def evaluations(store: StoreView) -> list[Evaluated]:
    """By version. An answer without a result (its reward failed) counts in no mean."""
    if not store.exists("evaluation"):
        return []
    rows = store.query(
        """
        with best as (
            select version, prompt_index, max(reward) as reward from evaluation where mode = 'sampled' group by all
        )
        select e.version, count(distinct e.prompt_index) as prompts,
               coalesce(max(e.sample) filter (where mode = 'sampled') + 1, 0) as samples,
               avg(e.reward) filter (where mode = 'greedy') as greedy,
               avg(e.reward) filter (where mode = 'sampled') as average,
               (select avg((reward >= 1)::int) from best where best.version = e.version) as passed
        from evaluation e group by e.version order by e.version
        """
    ).to_pylist()
    return [Evaluated(**row) for row in rows]


def _fates(store: StoreView, decided: Sequence[BatchDecision]) -> list[Fate]:
    """Counted by group, so that a fate without any committed trajectory is named too."""
    fate_of = {group: "trained" for decision in decided for group in decision.trained}
    fate_of |= {group: reason for decision in decided for group, reason in decision.retired.items()}
    fates = pa.table({"group": pa.array(fate_of.keys(), pa.int64()), "fate": pa.array(fate_of.values(), pa.string())})
    with store.connect() as connection:
        connection.register("fates", fates)
        rows = connection.sql(
            "select fate, count(*) as n, avg(len(token_ids)) as mean, max(len(token_ids)) as longest "
            'from experience join fates using ("group") group by fate'
        ).to_arrow_table()
    lengths = {row["fate"]: row for row in rows.to_pylist()}
    return [
        Fate(name, groups, row["n"], row["mean"], row["longest"])
        if (row := lengths.get(name)) is not None
        else Fate(name, groups, 0, None, None)
        for name, groups in sorted(Counter(fate_of.values()).items(), key=lambda item: (item[0] != "trained", item[0]))
    ]


def summary(result: Summary) -> str:
    """Plain text, about 80 columns."""
    lines = [_headline(result), "", *_reward_lines(result), *_evaluation_lines(result), *_fate_lines(result)]
    errors = {status: n for status, n in result.statuses.items() if status != "ok"}
    if errors:
        lines.append("errors      " + ", ".join(f"{n} {status}" for status, n in errors.items()))
    if result.steps:
        lines.append(f"versions    0 to {max(row.version for row in result.steps)}")
    return "\n".join([*lines, f"store       {result.store}", "", "next", *_next_lines(result)])


def _next_lines(result: Summary) -> list[str]:
    """Commands that have something to show."""
    able = {"plot": bool(result.steps), "experience ls": bool(result.statuses), "audit": True}
    return [f"  laminar {command} {result.store}" for command, shows in able.items() if shows]


def _headline(result: Summary) -> str:
    because = f": {result.reason}" if result.reason else ""
    return f"run {result.run}: {result.state} after {len(result.steps)} of {result.max_steps} steps{because}"


def _reward_lines(result: Summary) -> list[str]:
    if not result.rewards:
        return ["reward      none: no step has trained on a reward"]
    first, last = result.rewards[:5], result.rewards[-10:]
    gain = f" ({mean(last) - mean(first):+.3f})" if len(result.rewards) >= 15 else ""
    return [
        f"reward      first {len(first)} steps {mean(first):.3f}, last {len(last)} steps {mean(last):.3f}{gain}",
    ]


def _evaluation_lines(result: Summary) -> list[str]:
    lines: list[str] = []
    shown = result.evaluations if len(result.evaluations) <= 2 else [result.evaluations[0], result.evaluations[-1]]
    for e in shown:
        heading = "" if lines else "held out"
        lines.append(
            f"{heading:<12}version {e.version}: greedy {number(e.greedy)}, avg@{e.samples} {number(e.average)}, "
            f"pass@{e.samples} {number(e.passed)} ({e.prompts} prompts)"
        )
    return lines


def _fate_lines(result: Summary) -> list[str]:
    lines: list[str] = []
    for fate in result.fates:
        heading = "" if lines else "groups"
        label = "trained" if fate.name == "trained" else f"retired, {fate.name}"
        tokens = f"mean {number(fate.mean_tokens, 1)} tokens, longest {number(fate.longest_tokens, 0)}"
        lines.append(f"{heading:<12}{fate.groups} {label} ({fate.trajectories} trajectories, {tokens})")
    return lines or ["groups      none was consumed"]
