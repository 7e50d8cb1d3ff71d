"""Answers of `status.py` and `inspect.py` as things that rich prints. Pure: data in, renderable out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from laminar.workers.viewing.display import number, render, short
from laminar.workers.viewing.inspect import Segment, TrajectoryView
from laminar.workers.viewing.status import LiveStatus, RunStatus, StepRow, to_snapshot

if TYPE_CHECKING:
    from laminar.workers.viewing.replay import ReplayedStep

CELL_WIDTH = 60
"""Longer cells are cut, with a mark: a list of 8,192 tokens helps nobody in a terminal. `export` keeps all."""
POLICY, ENVIRONMENT = "green", "cyan"
TOKENS_SHOWN = 40


def table(rows: pa.Table, *, limit: int) -> RenderableType:
    """The first `limit` rows, and a line that says how many more there are."""
    more = rows.num_rows - limit
    footer = f"… {more} more rows; raise --limit, or `laminar experience export`" if more > 0 else ""
    return Group(_Rows(rows.slice(0, limit)), Text(footer or f"{rows.num_rows} rows", style="dim"))


@dataclass(frozen=True)
class _Rows:
    """A row a line where that fits the console's width, else a column a line: cut headings help nobody."""

    rows: pa.Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = self._grid()
        needed = Measurement.get(console, options.update(width=100_000), grid).maximum
        if needed <= options.max_width:
            yield grid
            return
        for number_of, row in enumerate(self.rows.to_pylist()):
            yield Text(f"row {number_of}", style="bold")
            fields = Table.grid(padding=(0, 2))
            for name, value in row.items():
                fields.add_row(Text(name, style="dim"), Text(cell(value)))
            yield fields

    def _grid(self) -> Table:
        grid = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
        for column in self.rows.schema:
            numeric = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
            grid.add_column(column.name, justify="right" if numeric else "left", no_wrap=True)
        for row in self.rows.to_pylist():
            grid.add_row(*(Text(cell(value)) for value in row.values()))
        return grid


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = (json.dumps(value, default=str) if isinstance(value, list) else str(value)).replace("\n", "⏎")
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"


def trajectory(view: TrajectoryView) -> RenderableType:
    """Everything that is known of one trajectory: outcome, training, writers, and the text by who wrote it."""
    row = view.row
    parts: list[RenderableType] = [
        Text(f"trajectory ({row['group']}, {row['sample']})", style="bold"),
        _facts(view),
        Text("\nwritten by", style="bold"),
        _spans(view),
        Text("\ntrained in", style="bold"),
        _steps(view),
        Text("\nprompt", style="bold"),
        Text(view.prompt if view.prompt is not None else _ids(row["prompt_ids"] or [])),
        Text("\nresponse", style="bold"),
        *_response(view),
    ]
    return Group(*parts)


def _facts(view: TrajectoryView) -> Table:
    row = view.row
    parts = json.loads(row["reward_parts"] or "{}")
    prompt_tokens, tokens = len(row["prompt_ids"] or []), len(row["token_ids"] or [])
    facts = {
        "prompt": f"{row['prompt_index']} (epoch {row['epoch']})",
        "reward": cell(row["reward"]) + "".join(f"  {name} {cell(value)}" for name, value in parts.items()),
        "status": row["status"] + (f": {row['error']}" if row["error"] else ""),
        "finish reason": cell(row["finish_reason"]),
        "tokens": f"{tokens}, of {row['turns']} turns, after {prompt_tokens} of prompt",
        "version": cell(row["version"]),
        "time": f"{cell(row['started_at'])} to {cell(row['finished_at'])} UTC",
        "attempts": cell(row["attempts"]),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="dim"), Text(str(value)))
    return grid


def _spans(view: TrajectoryView) -> RenderableType:
    if not view.spans:
        return Text("  nobody: it has no tokens", style="dim")
    grid = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for heading in ("tokens", "version", "worker", "weights digest"):
        grid.add_column(heading, no_wrap=True)
    for span in view.spans:
        grid.add_row(f"{span.start}–{span.end}", str(span.version), span.worker, span.digest)
    return grid


def _steps(view: TrajectoryView) -> RenderableType:
    if not view.steps:
        return Text(f"  no step: {_why_untrained(view)}", style="dim")
    columns = ("step", "advantage", "staleness", "tokens", "mean_ratio", "clip_fraction", "policy_loss", "mean_logprob")
    grid = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="right", no_wrap=True)
    for step in view.steps:
        grid.add_row(*(cell(step[column]) for column in columns))
    return grid


def _why_untrained(view: TrajectoryView) -> str:
    consumed = view.consumed
    if consumed is None:
        return "its group is not decided yet; a step takes it once all its samples are there"
    if not consumed.reason:
        own = "this trajectory ended with an error" if view.row["status"] != "ok" else "its rows are not committed yet"
        return f"its group was trained in step {consumed.step}, but {own}"
    why = f": {consumed.why}" if consumed.why else ""
    return f"its group was retired with the decision of step {consumed.step} as {consumed.reason}{why}"


def _response(view: TrajectoryView) -> list[RenderableType]:
    """Labels stand before each segment, so that the roles can be told without colour."""
    if not view.segments:
        return [Text("(empty)", style="dim")]
    if any(segment.text is None for segment in view.segments):
        note = Text("no tokenizer found: token ids by writer, then the decoded text as it was stored", style="dim")
        return [note, *(_segment(segment) for segment in view.segments), Text(view.row["text"] or "")]
    return [_segment(segment) for segment in view.segments]


def _segment(segment: Segment) -> Text:
    policy = segment.role == "policy"
    label = f"[policy, version {segment.version}] " if policy else "[environment] "
    body = segment.text if segment.text is not None else _ids(segment.token_ids)
    return Text.assemble((label, "dim"), (body, POLICY if policy else ENVIRONMENT))


def _ids(token_ids: list[int]) -> str:
    more = len(token_ids) - TOKENS_SHOWN
    return " ".join(map(str, token_ids[:TOKENS_SHOWN])) + (f" … {more} more" if more > 0 else "")


REPLAYED = {
    "reward": "reward_mean",
    "loss": "policy_loss",
    "ratio": "ratio_mean",
    "kl": "kl_behaviour",
    "gradient": "grad_norm",
}


def replayed(step: ReplayedStep) -> RenderableType:
    """One line: each number, and in brackets the recorded one."""
    was = step.recorded.metrics if step.recorded else {}
    parts = [f"{label} {cell(step.metrics.get(name))} ({cell(was.get(name))})" for label, name in REPLAYED.items()]
    digest = {True: "equal", False: "other", None: "not recorded"}[step.equal]
    return Text(f"step {step.step} | " + " | ".join(parts) + f" | digest {step.digest[:12]} {digest}")


def status(result: RunStatus) -> RenderableType:
    parts: list[RenderableType] = []
    if result.live is not None:
        # The time since the start is known to the process that shows the run, not to etcd.
        snapshot = to_snapshot(result.live, max_steps=result.max_steps, elapsed_s=0.0)
        parts += [render(snapshot), _live(result.live)]
    else:
        done = result.last.step + 1 if result.last else 0
        state = result.ending.state if result.ending else "not running"
        parts.append(Text.assemble((result.run, "bold"), f"  step {done}/{result.max_steps}, {state}"))
    if result.live is None or not result.live.workers:
        parts.append(Text(_ending(result)))
    outcome = f"experience  {_counts(result.statuses)}; finished by {_counts(result.finish_reasons)}"
    parts += [_last_step(result.last), Text(outcome), Text(f"store       {result.store}")]
    return Group(*parts)


def _ending(result: RunStatus) -> str:
    """How the run ended, as far as its `laminar run` could tell; lines after the first are those of a worker's log."""
    ending = result.ending
    if ending is None:
        return (
            "ended       not noted: its `laminar run` was killed, or works where its etcd cannot be reached from here "
            f"({result.why_not_live or 'no worker is alive'}); the same command resumes it"
        )
    at = datetime.fromtimestamp(ending.at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    then = "" if ending.state == "done" else "; the same command resumes it"
    return f"{'ended':<12}{ending.state} at {at}: {ending.reason.splitlines()[0] if ending.reason else '–'}{then}"


def _live(live: LiveStatus) -> RenderableType:
    head, weights = live.head, live.weights
    lines = []
    if head is not None:
        reason = f" ({head.reason})" if head.reason else ""
        state: str = head.state
        if state == "running" and all(worker.kind != "trainer" for worker in live.workers):
            state = "none is alive"
        checkpoint = f"checkpoint {head.checkpoint}" if head.checkpoint >= 0 else "no checkpoint"
        lines.append(f"trainer     {state}{reason}: {head.step} steps trained, {head.decided} decided, {checkpoint}")
    if weights is not None:
        size = f"{weights.bytes / 2**20:.1f} MiB"
        lines.append(f"weights     version {weights.version}, digest {weights.digest[:12]}, {size}")
    lines.append(f"claims      {_counts(live.claims)}")
    lines.append(f"uncommitted {_counts(live.incoming)}")
    lines += [f"committer   {text}" for text in _crashes(live)]
    if any(w.moved_out or w.moved_in for w in live.workers):
        figures = ("moved_out", "moved_in", "refilled_tokens")
        out, came, again = (sum(getattr(w, name) for w in live.workers) for name in figures)
        lines.append(f"moved       {out} handed over by repack, {came} taken over, {again:,} tokens prefilled again")
    lines.append("leaders     " + (", ".join(f"{role} {short(w)}" for role, w in live.leaders.items()) or "none"))
    return Text("\n".join(lines))


def _crashes(live: LiveStatus) -> list[str]:
    return [
        f"crash {t.crashes} of that beside relay {short(relay)} since a row was committed: it {t.how}"
        for relay, t in live.committers.items()
        if t is not None
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "none"


def _last_step(row: StepRow | None) -> Text:
    if row is None:
        return Text("last step   none is committed yet")
    return Text(
        f"last step   {row.step}: reward {number(row.reward)}, response {number(row.response_length, 1)} tokens, "
        f"staleness {number(row.staleness_mean, 1)} (max {number(row.staleness_max, 0)}), version {row.version}"
    )
