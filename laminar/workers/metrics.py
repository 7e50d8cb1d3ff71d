"""Where metrics go besides the store: TensorBoard files, wandb, trackio.

The store's `step_metrics` is the record; a sink is a copy for looking at. So a sink may be slow, broken or offline
and the run goes on: each sink has a thread of its own that writes records in order and tries a failed one again with
back-off. What could not be written is counted and said, never dropped in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from laminar.config import LoggingConfig
from laminar.errors import ConfigError

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
TRIES_AT_END = 3
"""Failed writes after which a sink is given up while the run ends."""
PENDING_LIMIT = 10_000
"""Records that wait for one sink at most (about 10 MB); beyond it the oldest is left out and counted."""


@dataclass(frozen=True)
class Record:
    """The finite metrics of one step. `at_us`: UTC microseconds; None: when the sink writes it."""

    step: int
    at_us: int | None
    metrics: dict[str, float]


class Sink(Protocol):
    """Blocking; only its own thread calls it. May raise anything: `write` of the same record is then tried again."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SinkReport:
    """`pending` were never accepted, `left_out` fell off the full queue; both are still in the store."""

    name: str
    written: int
    failures: int
    pending: int
    left_out: int
    last_error: str


class MetricSinks:
    """All sinks of a run. `log` never blocks and never raises; `close` waits for a bounded time.

    `run_id` (the store's id) lets a resumed run go on in the same wandb run. Raises ConfigError at construction when
    a sink that was asked for is not installed.
    """

    def __init__(self, store_root: str, logging_config: LoggingConfig, *, run: str = "", run_id: str = "") -> None:
        name = run or store_root.rstrip("/").rsplit("/", 1)[-1]
        makers: dict[str, Callable[[], Sink]] = {}
        if logging_config.tensorboard and "://" not in store_root:
            makers["tensorboard"] = partial(TensorBoardSink, Path(store_root) / "tensorboard")
        for module in logging_config.sinks:
            _require(module)
            makers[module] = partial(ModuleSink, module, name, run_id)
        self.writers = [SinkWriter(sink, make) for sink, make in makers.items()]

    def log(self, step: int, metrics: Mapping[str, float | None], *, at_us: int | None = None) -> None:
        """Null and non-finite metrics are left out: a sink would show them as a number or refuse the record."""
        finite = {name: float(v) for name, v in metrics.items() if v is not None and math.isfinite(v)}
        record = Record(step, at_us, finite)
        for writer in self.writers:
            writer.put(record)

    def close(self, timeout_s: float = 10.0) -> list[SinkReport]:
        """Write what is pending, for at most `timeout_s` seconds a sink, and say what was not written."""
        for writer in self.writers:
            writer.finish()
        reports = [writer.join(timeout_s) for writer in self.writers]
        for report in reports:
            if report.pending or report.left_out:
                log.warning(
                    "metrics sink %s lacks %d steps (%d never accepted, %d left out of a full queue; last error: %s); "
                    "they are in the store's step_metrics",
                    report.name, report.pending + report.left_out, report.pending, report.left_out, report.last_error,
                )  # fmt: skip
        return reports

    @property
    def failures(self) -> dict[str, int]:
        """Failed writes so far, by sink."""
        return {writer.name: writer.failures for writer in self.writers}


class SinkWriter:
    """One sink and its thread. The sink itself is made in the thread: opening may fail and be tried again too."""

    def __init__(self, name: str, make: Callable[[], Sink], *, first_retry_s: float = FIRST_RETRY_S) -> None:
        self.name = name
        self.written = 0
        self.failures = 0
        self.left_out = 0
        self.last_error = ""
        self._make = make
        self._first_retry_s = first_retry_s
        self._pending: deque[Record] = deque()
        self._changed = threading.Condition()
        self._finishing = threading.Event()
        # A daemon: a sink that hangs in its library must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        with self._changed:
            if len(self._pending) >= PENDING_LIMIT:
                self._pending.popleft()
                self.left_out += 1
                if self.left_out == 1:
                    log.warning("metrics sink %s is %d steps behind: the oldest are left out", self.name, PENDING_LIMIT)
            self._pending.append(record)
            self._changed.notify()

    def finish(self) -> None:
        with self._changed:
            self._finishing.set()
            self._changed.notify()

    def join(self, timeout_s: float) -> SinkReport:
        self._thread.join(timeout_s)
        with self._changed:
            return SinkReport(
                self.name, self.written, self.failures, len(self._pending), self.left_out, self.last_error
            )

    def _work(self) -> None:
        sink: Sink | None = None
        delay = self._first_retry_s
        tries_at_end = TRIES_AT_END
        while (record := self._next()) is not None and tries_at_end > 0:
            finishing = self._finishing.is_set()
            try:
                if sink is None:
                    sink = self._make()
                sink.write(record)
            except Exception as e:  # a sink's library may raise anything
                self._failed(e)
                if finishing:
                    tries_at_end -= 1
                self._finishing.wait(delay)
                delay = min(2 * delay, LONGEST_RETRY_S)
            else:
                delay = self._first_retry_s
                self._done(record)
        if sink is not None:
            try:
                sink.close()
            except Exception as e:  # as above
                self._failed(e)

    def _next(self) -> Record | None:
        """The oldest pending record, kept in the queue until it is written; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._finishing.is_set())
            return self._pending[0] if self._pending else None

    def _done(self, record: Record) -> None:
        with self._changed:
            # A full queue may have left the record out while it was being written.
            if self._pending and self._pending[0] is record:
                self._pending.popleft()
            else:
                self.left_out -= 1
            self.written += 1

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = f"{type(error).__name__}: {error}"
        level = logging.WARNING if self.failures == 1 else logging.DEBUG
        log.log(
            level,
            "metrics sink %s failed (%d times): %s; the run goes on, the record is tried again",
            self.name, self.failures, self.last_error,
        )  # fmt: skip


class TensorBoardSink:
    """Event files through the `tensorboard` package's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = Writer(str(folder))

    def write(self, record: Record) -> None:
        at_s = None if record.at_us is None else record.at_us / 1e6
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step, wall_time=at_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ModuleSink:
    """wandb or trackio: both offer `init`, `log` and `finish` at module level."""

    def __init__(self, module: str, run: str, run_id: str) -> None:
        self._module: Any = importlib.import_module(module)
        options = {"id": run_id} if run_id and module == "wandb" else {}
        self._module.init(project="laminar", name=run, resume="allow", **options)

    def write(self, record: Record) -> None:
        self._module.log(record.metrics, step=record.step)

    def close(self) -> None:
        self._module.finish()


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"logging.sinks asks for {module!r}, which is not installed: `pip install {module}`, "
            "or take it out of the list"
        )
