"""What a person sees while `laminar run` works, and at its end.

`render` and `plain_line` are pure: a `Snapshot` in, something printable out. `Display` only decides when and where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laminar.buffer.space import says_full
from laminar.workers.viewing.absence import Absences, absent

HEARTBEAT_S = 30.0
"""In plain output a line is due at least this often, so that a long start or step does not look like a hang."""
EVENTS_SHOWN = 6


@dataclass(frozen=True)
class WorkerView:
    """One worker. Numbers are None where its kind has none; `kv_share` is used / capacity, `tokens_per_s` decoded."""

    id: str
    kind: str
    version: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_share: float | None = None
    tokens_per_s: float | None = None
    draining: bool = False
    activity: str = ""
    moved_out: int = 0
    """Unfinished trajectories that a plan moved to others, or that came from others; tokens prefilled again."""
    moved_in: int = 0
    refilled_tokens: int = 0


@dataclass(frozen=True)
class Event:
    """Something that a person should know, such as a restart. `number` grows by one an event."""

    number: int
    text: str


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. Figures are None until a step has some; `drawn` to `in_flight` count groups."""

    run: str = ""
    step: int = 0
    max_steps: int = 0
    elapsed_s: float = 0.0
    reward: float | None = None
    reward_mean_10: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    tokens_per_s: float | None = None
    drawn: int = 0
    consumed: int = 0
    complete: int = 0
    in_flight: int = 0
    workers: tuple[WorkerView, ...] = ()
    events: tuple[Event, ...] = ()


def render(snapshot: Snapshot, away: Mapping[str, float] | None = None) -> RenderableType:
    """Progress, the figures that matter, the workers, the last events; about 80 columns wide. `away`: seconds for which
    a kind of worker has nobody alive."""
    parts: list[RenderableType] = [_progress(snapshot), _figures(snapshot)]
    if snapshot.workers:
        parts.append(_workers(snapshot.workers))
    parts += [Text(f"  {absent(kind, seconds)}", style="red") for kind, seconds in (away or {}).items()]
    parts += [Text(f"  {event.text}", style="yellow", overflow="ellipsis", no_wrap=True) for event in _last(snapshot)]
    return Group(*parts)


def _last(snapshot: Snapshot) -> tuple[Event, ...]:
    return snapshot.events[-EVENTS_SHOWN:]


def _progress(snapshot: Snapshot) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        Text(snapshot.run or "run", style="bold"),
        ProgressBar(total=max(snapshot.max_steps, 1), completed=snapshot.step, width=32),
        Text(f"step {snapshot.step}/{snapshot.max_steps}"),
        Text(duration(snapshot.elapsed_s), style="dim"),
    )
    return grid


def _figures(snapshot: Snapshot) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        _labelled("reward", f"{number(snapshot.reward)} (mean of 10: {number(snapshot.reward_mean_10)})"),
        _labelled("staleness", f"{number(snapshot.staleness_mean, 1)} (max {number(snapshot.staleness_max, 0)})"),
        _labelled("tokens/s", number(snapshot.tokens_per_s, 0)),
    )
    groups = (
        f"{snapshot.drawn} drawn · {snapshot.consumed} consumed · "
        f"{snapshot.complete} complete, waiting · {snapshot.in_flight} in flight"
    )
    return Group(grid, _labelled("groups", groups))


def _labelled(label: str, value: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), value)


def _workers(workers: Sequence[WorkerView]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("worker", no_wrap=True)
    for heading in ("version", "running", "waiting", "KV", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("activity")
    for worker in workers:
        activity = "draining" if worker.draining and not worker.activity else worker.activity
        table.add_row(
            f"{worker.kind} {short(worker.id)}",
            number(worker.version, 0),
            number(worker.running, 0),
            number(worker.waiting, 0),
            "–" if worker.kv_share is None else f"{worker.kv_share:.0%}",
            number(worker.tokens_per_s, 0),
            Text(activity, style="yellow" if worker.draining else ""),
        )
    return table


def plain_line(snapshot: Snapshot) -> str:
    """One line a step, for logs and continuous integration: `key value` pairs that grep and awk can take apart."""
    fields = (
        f"step {snapshot.step}/{snapshot.max_steps}",
        f"reward {number(snapshot.reward)}",
        f"mean10 {number(snapshot.reward_mean_10)}",
        f"staleness {number(snapshot.staleness_mean, 1)} max {number(snapshot.staleness_max, 0)}",
        f"tokens/s {number(snapshot.tokens_per_s, 0)}",
        f"groups drawn {snapshot.drawn} consumed {snapshot.consumed} complete {snapshot.complete} "
        f"in-flight {snapshot.in_flight}",
        f"elapsed {duration(snapshot.elapsed_s)}",
    )
    return " | ".join(fields)


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def short(worker: str) -> str:
    """`4711-9f2c` of `rollout-node7-4711-9f2c`: what tells two workers of a kind apart."""
    return "-".join(worker.split("-")[-2:])


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass
class _Shown:
    step: int = -1
    at_s: float = float("-inf")
    event: int = -1


@dataclass
class Display:
    """A live picture on a terminal; with `plain`, on a pipe or under CI one line a step and one an event.

    A context manager: leaving it restores the terminal, however the run ended.
    """

    plain: bool
    console: Console = field(default_factory=Console)
    _live: Live | None = None
    _shown: _Shown = field(default_factory=_Shown)
    _absences: Absences = field(default_factory=Absences)

    def __post_init__(self) -> None:
        if not self.console.is_terminal or os.environ.get("CI"):
            self.plain = True

    def __enter__(self) -> Display:
        if not self.plain:
            self._live = Live(console=self.console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, snapshot: Snapshot) -> None:
        told = self._absences.look({worker.kind for worker in snapshot.workers}, snapshot.elapsed_s)
        if self._live is not None:
            self._live.update(render(snapshot, self._absences.away), refresh=True)
            return
        for event in snapshot.events:
            if event.number > self._shown.event:
                self._shown.event = event.number
                self._print(event.text)
        for sentence in told:
            self._print(sentence)
        if snapshot.step != self._shown.step or snapshot.elapsed_s - self._shown.at_s >= HEARTBEAT_S:
            self._shown.step, self._shown.at_s = snapshot.step, snapshot.elapsed_s
            self._print(plain_line(snapshot))

    def _print(self, line: str) -> None:
        write_line(self.console.file, line)


def write_line(stream: IO[str], text: str) -> None:
    """Write text and an end of line, at once. A full disk under a redirected output must not end the run: the stream
    keeps the text for the next time."""
    try:
        stream.write(text + os.linesep)
        stream.flush()
    except OSError as e:
        if not says_full(e):
            raise
