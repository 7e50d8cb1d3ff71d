"""`laminar plot`: reward, response length and staleness of a run, over steps and over time, as one PNG."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.errors import ConfigError, StoreError
from laminar.workers.viewing.inspect import StoreView
from laminar.workers.viewing.status import StepRow, step_rows

RUNNING_MEAN = 10
"""Steps that the running mean looks back: single steps swing too much to be judged."""
INK, SOFT, ACCENT, MARK = "#1f2933", "#9aa5b1", "#0b6e99", "#c8553d"


@dataclass(frozen=True)
class EvaluationPoint:
    """Mean reward of one version on the held-out prompts; `mode` is how it was sampled."""

    version: int
    mode: str
    at_s: float
    reward: float
    samples: int


def evaluation_points(store: StoreView) -> list[EvaluationPoint]:
    rows = store.query(
        """
        select version, mode, max(epoch_us("at")) / 1e6 as at_s, avg(reward) as reward, count(reward) as samples
        from evaluation where reward is not null group by version, mode order by mode, version
        """
    ).to_pylist()
    return [EvaluationPoint(**row) for row in rows]


def running_mean(values: Sequence[float | None], window: int = RUNNING_MEAN) -> list[float | None]:
    """Mean of the last `window` entries that are numbers; None until there is one."""
    result: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if value is not None]
        result.append(sum(known) / len(known) if known else None)
    return result


def plot(store: StoreView, output: Path) -> Path:
    """Write a PNG to `output` (replaced as a whole). Raises StoreError before the first committed step."""
    rows = step_rows(store)
    if not rows:
        raise StoreError(f"{store.root} has no committed step yet; there is nothing to plot")
    if not output.parent.is_dir():
        raise ConfigError(f"the folder {output.parent} does not exist; make it first")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3, sharey="col")
    points = evaluation_points(store)
    # Minutes since the first step was recorded; an evaluation of the initial model may come before it.
    origin = min([row.at_s for row in rows] + [point.at_s for point in points])
    over_steps = [float(row.step) for row in rows]
    minutes = [(row.at_s - origin) / 60 for row in rows]
    for line, x in ((0, over_steps), (1, minutes)):
        label = "step" if line == 0 else "minutes"
        _reward(axes[line, 0], x, rows)
        _evaluations(axes[line, 0], points, lambda p, first=line == 0: p.version if first else (p.at_s - origin) / 60)
        _lengths(axes[line, 1], x, rows)
        _staleness(axes[line, 2], x, rows)
        for axis in axes[line]:
            axis.set_xlabel(label, color=INK)
    _finish(axes)
    figure.suptitle(f"{store.run.run}: {len(rows)} steps in {_span(rows)}", color=INK, fontsize=13, x=0.01, ha="left")
    return save_figure(figure, output)


def _series(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _reward(axis: Any, x: Sequence[float], rows: Sequence[StepRow]) -> None:
    rewards = [row.reward for row in rows]
    axis.plot(x, _series(rewards), ".", color=SOFT, markersize=5, label="step")
    axis.plot(x, _series(running_mean(rewards)), color=ACCENT, linewidth=2, label=f"mean of {RUNNING_MEAN} steps")
    axis.set_title("reward", loc="left", color=INK)


def _evaluations(axis: Any, points: Sequence[EvaluationPoint], x_of: Any) -> None:
    for marker, mode in zip("DoSs^", sorted({point.mode for point in points}), strict=False):
        chosen = [point for point in points if point.mode == mode]
        axis.plot(
            [x_of(point) for point in chosen],
            [point.reward for point in chosen],
            marker=marker.lower(),
            linestyle=":",
            linewidth=1,
            markersize=6,
            color=MARK,
            markerfacecolor=MARK if marker == "D" else "white",
            label=f"held out, {mode}",
        )


def _lengths(axis: Any, x: Sequence[float], rows: Sequence[StepRow]) -> None:
    lengths = [row.response_length for row in rows]
    longest = [row.metrics.get("response_length_max") for row in rows]
    if any(value is not None for value in longest):
        axis.plot(x, _series(longest), color=SOFT, linewidth=1, label="longest")
    axis.plot(x, _series(lengths), ".", color=SOFT, markersize=4, label="step's mean")
    axis.plot(x, _series(running_mean(lengths)), color=ACCENT, linewidth=2, label=f"mean of {RUNNING_MEAN} steps")
    axis.set_ylim(bottom=0)
    axis.set_title("response length, tokens", loc="left", color=INK)


def _staleness(axis: Any, x: Sequence[float], rows: Sequence[StepRow]) -> None:
    axis.step(x, _series([row.staleness_max for row in rows]), where="mid", color=SOFT, linewidth=1, label="largest")
    axis.plot(x, _series([row.staleness_mean for row in rows]), color=ACCENT, linewidth=2, label="step's mean")
    axis.set_ylim(bottom=0)
    axis.set_title("staleness, versions", loc="left", color=INK)


def _finish(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes.flat:
        axis.grid(True, color="#e4e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, labelleft=True)
        axis.margins(x=0.02)
    for axis in axes[:, 2]:
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[0]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(frameon=False, fontsize=8, labelcolor=INK)


def _span(rows: Sequence[StepRow]) -> str:
    minutes = (rows[-1].at_s - rows[0].at_s) / 60
    return f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"


def save_figure(figure: Any, output: Path) -> Path:
    """Write a figure as PNG, replaced as a whole. Raises StoreError."""
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, output)
    except OSError as e:
        raise StoreError(f"cannot write the plot {output}: {e.strerror or e}") from e
    finally:
        temporary.unlink(missing_ok=True)
    return output
