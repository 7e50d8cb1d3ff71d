"""`laminar simulate --fit RUN`: what a recorded run says of lengths and rates, and how many rollouts balance a trainer.

    experience: lengths, starts, ends, workers ──▶ how many ran at once, seconds a token ──▶ decode table
    step_metrics: train_s, groups              ──▶ consumed tokens a step, computed tokens a second
              consumed tokens a step / (seconds a step x tokens a second of one rollout) = rollouts for a trainer

The lengths go into a file beside the TOML, which `laminar simulate` draws from.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from laminar.config import Config, config_from
from laminar.errors import ConfigError, StoreError
from laminar.simulator.scale.costs import fitted
from laminar.simulator.scale.settings import MOST_GPUS
from laminar.simulator.scale.stops import without_stops
from laminar.workers.training.length_bias import policy_tokens
from laminar.workers.viewing.export import checked_writer, write_table
from laminar.workers.viewing.inspect import StoreView

FORWARD_SHARE = 3.0
"""A training pass costs about three forward passes; a prefill is one."""
FEWEST = 16
"""Trajectories below which nothing is said."""

QUERY = """
select coalesce(len(prompt_ids), 0) as prompt, policy_mask, span_worker[1] as worker, turns,
       epoch_us(started_at) / 1e6 as began, epoch_us(finished_at) / 1e6 as ended
from experience where len(token_ids) > 0 and started_at is not null and finished_at > started_at
order by "group", sample
"""


@dataclass(frozen=True)
class Fit:
    """Rates in tokens a second: `rollout_rate` of one rollout's policy tokens while it has work; of the trainer, with
    prompts, `train_rate` of what it computes and `consume_rate` of all that its steps consume. `decode`: rows of
    (batch, tokens in the KV cache, seconds a token). `step_s`: the median of a training step; `step_tokens`: policy
    tokens that a step consumes, those of retired groups too; `stopped_s`: in which the run stood still."""

    run: str
    lengths: list[int]
    prompt_tokens: int
    turns: int
    workers: int
    rollout_rate: float
    train_rate: float
    consume_rate: float
    step_s: float
    step_tokens: float
    decode: list[tuple[float, float, float]]
    groups_per_step: int
    samples_per_prompt: int
    max_ahead_groups: int
    max_ready_groups: int
    max_staleness: int | None
    max_running: int
    stopped_s: float

    @property
    def rollouts(self) -> float:
        """How many rollouts generate as fast as one trainer trains, where both work at once."""
        return self.step_tokens / (self.step_s * self.rollout_rate)

    @property
    def takes_turns(self) -> bool:
        """Rollouts wait while the trainer trains, and it for them: no number of rollouts balances that."""
        return self.max_staleness == 0

    @property
    def whole_rollouts(self) -> int:
        """Rounded up: a trainer that waits holds everybody, a rollout that waits only itself. In turns, those that the
        run had."""
        return self.workers if self.takes_turns else max(1, math.ceil(self.rollouts - 0.05))

    def says(self) -> str:
        lengths = np.array(self.lengths)
        stopped = [f"left out: {self.stopped_s:,.0f} s in which the run stood still"] if self.stopped_s else []
        return "\n".join(
            [
                f"{self.run}: {len(lengths)} trajectories, {lengths.mean():.0f} tokens in the mean, median "
                f"{np.median(lengths):.0f}, 99th percentile {np.percentile(lengths, 99):.0f}, longest {lengths.max()}",
                f"one rollout with work makes {self.rollout_rate:,.0f} tokens/s; a step consumes "
                f"{self.step_tokens:,.0f} and takes the trainer {self.step_s:.2f} s",
                self._balance(),
                *stopped,
                *filter(None, [fitted(self.decode).untold]),
            ]
        )

    def _balance(self) -> str:
        if self.takes_turns:
            generating_s = self.step_tokens / (self.workers * self.rollout_rate)
            return (
                "balance: rollouts and trainer take turns (trainer.max_staleness = 0), so no number of rollouts "
                f"balances them; with the {self.workers} it had, a step generates for at least {generating_s:.2f} s "
                f"and trains for {self.step_s:.2f} s. Where both work at once, {self.rollouts:.2f} rollouts would "
                "balance the trainer"
            )
        more = self.whole_rollouts - self.workers
        advice = "as it had" if not more else f"it had {self.workers}: {abs(more)} {'more' if more > 0 else 'fewer'}"
        bound = "" if self.max_staleness is None else f", within trainer.max_staleness = {self.max_staleness}"
        return (
            f"balance: {self.rollouts:.2f} rollouts for one trainer, so {self.whole_rollouts} ({advice}), where both "
            f"work at once{bound}"
        )


def fit(store: StoreView) -> Fit:
    """Blocks. Raises StoreError where the run has recorded too little."""
    store.require("experience")
    store.require("step_metrics")
    rows = store.query(QUERY)
    if rows.num_rows < FEWEST:
        raise StoreError(f"{store.root} has {rows.num_rows} finished trajectories with times, {FEWEST} are needed")
    tokens = np.array(policy_tokens(rows["policy_mask"]), dtype=float)
    began, ended = (np.array(rows[name].to_pylist(), dtype=float) for name in ("began", "ended"))
    if not tokens.any():
        raise StoreError(f"{store.root}: no trajectory of {rows.num_rows} has a token of the policy; nothing follows")
    prompts = np.array(rows["prompt"].to_pylist(), dtype=float)
    workers = np.array([name or "" for name in rows["worker"].to_pylist()])
    names = sorted(set(workers))
    began, ended, stopped_s = without_stops(began, ended, tokens, _writes(store))
    busy_s = sum(_busy_s(began[workers == name], ended[workers == name]) for name in names)
    config = config_from(dict(store.run.config), origin=f"{store.root}/run.json")
    training = _training(store, config)
    found = Fit(
        run=store.run.run,
        lengths=[int(n) for n in tokens if n > 0],
        prompt_tokens=max(1, round(float(prompts.mean()))),
        turns=max(1, round(float(np.mean(rows["turns"].to_pylist())))),
        workers=_at_once(began, ended, workers),
        rollout_rate=float(tokens.sum()) / busy_s,
        train_rate=training.train_rate,
        consume_rate=training.consume_rate,
        step_s=training.step_s,
        step_tokens=training.step_tokens,
        decode=_decode_table(began, ended, tokens, prompts, workers),
        groups_per_step=config.trainer.groups_per_step,
        samples_per_prompt=config.sampling.samples_per_prompt,
        max_ahead_groups=config.max_ahead_groups,
        max_ready_groups=config.max_ready_groups,
        max_staleness=config.trainer.max_staleness,
        max_running=config.rollout.max_running,
        stopped_s=stopped_s,
    )
    refuse_absurd(found)
    return found


def _writes(store: StoreView) -> np.ndarray:
    """When each step was written, in seconds."""
    rows = store.query('select epoch_us("at") / 1e6 as at from step_metrics where "at" is not null')
    return np.array(rows["at"].to_pylist(), dtype=float)


def refuse_absurd(found: Fit) -> None:
    """Raises StoreError where so many rollouts would balance the trainer that the record must be wrong, or no advice
    can follow from it."""
    trajectories = found.groups_per_step * found.samples_per_prompt
    most = min(trajectories, MOST_GPUS - 1)
    if found.rollouts > most:
        why = "trajectories that a step takes" if most == trajectories else "rollouts that `laminar simulate` takes"
        raise StoreError(
            f"{found.run}: {found.rollouts:,.0f} rollouts would balance one trainer, more than the {most:,} {why}, so "
            f"nothing is written: a training step took {found.step_s:.3g} s for {found.step_tokens:,.0f} tokens, one "
            f"rollout made {found.rollout_rate:,.3g} tokens/s. Fit a run whose steps take as long as those that you "
            "plan, and whose rollouts had work"
        )


@dataclass(frozen=True)
class Training:
    """As the fields of the same names in `Fit`."""

    step_s: float
    train_rate: float
    consume_rate: float
    step_tokens: float


def _training(store: StoreView, config: Config) -> Training:
    """A step also retires what has no signal or failed: it is generated and consumed like the rest, and computed only
    with `trainer.skip_no_signal` off."""
    rows = store.query("select metrics from step_metrics where step >= 0 order by step").to_pylist()
    metrics = [m for row in rows if (m := json.loads(row["metrics"])).get("train_s") and m.get("response_length_mean")]
    if not metrics:
        raise StoreError(f"{store.root} has no trained step with its duration (train_s in step_metrics)")
    copies = [m["publish_copy_s"] for m in metrics if m.get("publish_copy_s")]
    prompt = store.query("select avg(len(prompt_ids)) as n from experience").to_pylist()[0]["n"] or 0.0
    seconds = np.array([m["train_s"] for m in metrics])
    lengths = np.array([m["response_length_mean"] for m in metrics])
    trained, no_signal, error = (
        config.sampling.samples_per_prompt * np.array([m[f"groups_{kind}"] for m in metrics])
        for kind in ("trained", "no_signal", "error")
    )
    consumed = trained + no_signal + error
    computed = trained if config.trainer.skip_no_signal else trained + no_signal
    step_s = float(np.median(seconds)) + (median(copies) if copies else 0.0)
    return Training(
        step_s=step_s,
        train_rate=float(np.median(computed * (lengths + prompt) / seconds)),
        consume_rate=float(np.mean(consumed * (lengths + prompt)) / np.median(seconds)),
        step_tokens=float(np.mean(consumed * lengths)),
    )


def _busy_s(began: np.ndarray, ended: np.ndarray) -> float:
    """Seconds in which at least one of the intervals goes on."""
    total, until = 0.0, -math.inf
    for start, end in sorted(zip(began.tolist(), ended.tolist(), strict=True)):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _at_once(began: np.ndarray, ended: np.ndarray, workers: np.ndarray) -> int:
    """How many workers had work at once at most: those of a restart are not counted twice."""
    events: list[tuple[float, int]] = []
    for name in sorted(set(workers)):
        own = workers == name
        events += [(float(began[own].min()), 1), (float(ended[own].max()), -1)]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def _decode_table(
    began: np.ndarray, ended: np.ndarray, tokens: np.ndarray, prompts: np.ndarray, workers: np.ndarray
) -> list[tuple[float, float, float]]:
    """Of each power of two of trajectories at once: their median number, tokens in the KV cache, seconds a token."""
    batch = np.zeros(len(began))
    for name in set(workers):
        own = workers == name
        batch[own] = _mean_at_once(began[own], ended[own])
    seconds = (ended - began) / np.maximum(tokens, 1)
    context = prompts + tokens / 2
    table = []
    sizes = np.floor(np.log2(np.maximum(batch, 1))).astype(int)
    for size in np.unique(sizes):
        some = sizes == size
        at_once = float(np.median(np.maximum(batch[some], 1)))
        table.append((at_once, at_once * float(np.median(context[some])), float(np.median(seconds[some]))))
    return table


def _mean_at_once(began: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Of each interval, how many of all go on during it, on average: its share of the integral over their number."""
    times = np.concatenate([began, ended])
    changes = np.concatenate([np.ones(len(began)), -np.ones(len(ended))])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(changes[order])
    integral = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    during = np.interp(ended, times, integral) - np.interp(began, times, integral)
    shares: np.ndarray = during / (ended - began)
    return shares


def check_fit_output(output: Path, *, force: bool) -> Path:
    """Where the lengths beside `output` go. Raises ConfigError if nothing could be written there."""
    trace = output.with_name(f"{output.stem}.lengths.parquet")
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; name a file in it with -o")
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; choose another path with -o, or replace it with --force")
    checked_writer(trace, force=force)
    return trace


def write_fit(found: Fit, output: Path, *, force: bool) -> list[Path]:
    """Write cluster.toml and the lengths beside it. Raises ConfigError, StoreError."""
    trace = check_fit_output(output, force=force)
    write_table(pa.table({"tokens": pa.array(found.lengths, pa.int32())}), trace, force=force)
    try:
        output.write_text(_toml(found, output.name, trace.name), encoding="utf-8")
    except OSError as e:
        raise StoreError(f"cannot write {output}: {e.strerror or e}") from e
    return [output, trace]


def _toml(found: Fit, name: str, trace: str) -> str:
    """What `settings.load_settings` takes, whatever the run is like."""
    longest = max(found.lengths)
    room = math.ceil(1.02 * found.max_running * (found.prompt_tokens + longest))
    staleness = "" if found.max_staleness is None else f"max_staleness = {found.max_staleness}\n"
    balance = f"{found.rollouts:.2f} balance one trainer" + (", were there no turns" if found.takes_turns else "")
    decode = "".join(f"    [{batch:.1f}, {kv:.0f}, {seconds:.4g}],\n" for batch, kv, seconds in found.decode)
    return f"""\
# From the run {found.run!r}: `laminar simulate {name}`
# Its devices are called GPUs here, whatever they are: one a rollout, the rest train.

[cluster]
gpus = {found.whole_rollouts + 1}

[model]
name = "measured"

[job]
groups_per_step = {found.groups_per_step}
samples_per_prompt = {found.samples_per_prompt}
mini_batches = 1
prompt_tokens = {found.prompt_tokens}
max_tokens = {longest}
max_ahead_groups = {found.max_ahead_groups}
max_ready_groups = {found.max_ready_groups}
{staleness}
[lengths]
trace = {json.dumps(trace, ensure_ascii=False)}

[environment]
turns = {found.turns}

[rollout]
gpus = {found.whole_rollouts}   # {balance}
max_running = {found.max_running}

[costs]
# Trajectories at once, tokens in the KV cache, seconds a token: from starts and ends of the recorded trajectories, so
# rewards and environments are in it.
decode = [
{decode}]
kv_tokens = {room}   # not recorded: room for all that runs at once
prefill_tokens_per_s = {FORWARD_SHARE * found.train_rate:.4g}   # not recorded: three times the rate of what is computed
train_tokens_per_s = {found.consume_rate:.4g}   # of all that a step consumes: retired groups cost the trainer nothing

[compare]
policies = ["synchronous", "one-step", "stream", "partial", "laminar"]
"""
