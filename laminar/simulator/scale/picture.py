"""A comparison as one PNG: throughput, where GPUs idle, how old what is trained on is, KV use over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from laminar.errors import ConfigError
from laminar.simulator.scale.meters import Outcome
from laminar.workers.viewing.plot import ACCENT, INK, MARK, SOFT, save_figure

COLOURS = (SOFT, "#7a8b99", "#b08968", MARK, ACCENT, "#3d405b", "#81b29a", "#e07a5f", "#f2cc8f", "#6d597a")


def check_output(output: Path) -> None:
    """Raises ConfigError if nothing could be written there: ask before the work that makes the picture."""
    if not output.parent.is_dir():
        raise ConfigError(f"the folder {output.parent} does not exist; make it first")
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; name a file in it with -o")
    try:
        with TemporaryFile(dir=output.parent):
            """Nothing else tells on every file system."""
    except OSError as e:
        raise ConfigError(
            f"nothing can be written in {output.absolute().parent}: {e.strerror or e}; name another with -o"
        ) from e


def draw(outcomes: Sequence[Outcome], title: str, output: Path) -> Path:
    """Write a PNG to `output`, replaced as a whole. Raises ConfigError, StoreError."""
    check_output(output)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    names = [o.policy for o in outcomes]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(outcomes) - 1)] + [ACCENT]
    _throughput(axes[0, 0], outcomes, names, colours)
    _idle(axes[0, 1], outcomes, names)
    _staleness(axes[1, 0], outcomes, colours)
    _kv(axes[1, 1], outcomes, colours)
    for axis in axes.flat:
        axis.grid(True, color="#e4e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK)
    figure.suptitle(title, color=INK, fontsize=13, x=0.01, ha="left")
    return save_figure(figure, output)


def _throughput(axis: Any, outcomes: Sequence[Outcome], names: Sequence[str], colours: Sequence[str]) -> None:
    values = [o.tokens_per_s for o in outcomes]
    axis.barh(names, values, color=colours)
    for place, value in enumerate(values):
        axis.text(value, place, f" {values[-1] / value:.2f} x", va="center", color=INK, fontsize=8)
    axis.margins(x=0.12)
    axis.invert_yaxis()
    axis.set_title("trained tokens a second (and how much faster the last one is)", loc="left", color=INK, fontsize=10)


def _idle(axis: Any, outcomes: Sequence[Outcome], names: Sequence[str]) -> None:
    places = range(len(names))
    axis.barh([p - 0.2 for p in places], [o.rollout_idle for o in outcomes], 0.38, color=ACCENT, label="generating")
    axis.barh([p + 0.2 for p in places], [o.trainer_idle for o in outcomes], 0.38, color=MARK, label="training")
    axis.set_yticks(list(places), names)
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    axis.legend(frameon=False, fontsize=8, labelcolor=INK)
    axis.set_title("share of GPU time without work", loc="left", color=INK, fontsize=10)


def _staleness(axis: Any, outcomes: Sequence[Outcome], colours: Sequence[str]) -> None:
    most = max(o.staleness_max for o in outcomes)
    width = 0.8 / len(outcomes)
    for place, (o, colour) in enumerate(zip(outcomes, colours, strict=True)):
        total = max(1, sum(o.staleness.values()))
        at = [age + (place - len(outcomes) / 2 + 0.5) * width for age in range(most + 1)]
        axis.bar(at, [o.staleness.get(age, 0) / total for age in range(most + 1)], width, color=colour, label=o.policy)
    axis.set_xticks(range(most + 1))
    axis.legend(frameon=False, fontsize=8, labelcolor=INK)
    axis.set_title("staleness of trained trajectories, versions", loc="left", color=INK, fontsize=10)


def _kv(axis: Any, outcomes: Sequence[Outcome], colours: Sequence[str]) -> None:
    for o, colour in zip(outcomes, colours, strict=True):
        axis.plot(
            [at / 60 for at, _ in o.kv_over_time], [share for _, share in o.kv_over_time], color=colour, linewidth=1.2,
            label=o.policy,
        )  # fmt: skip
    axis.set_ylim(0, 1)
    axis.set_xlabel("minutes", color=INK)
    axis.set_title("share of the engines' KV caches in use", loc="left", color=INK, fontsize=10)
