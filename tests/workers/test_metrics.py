"""Metric sinks may fail in any way: the run goes on, and what a sink lacks is counted and said."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from laminar.config import LoggingConfig
from laminar.errors import ConfigError
from laminar.workers import metrics as module
from laminar.workers.metrics import MetricSinks, Record, SinkWriter


class Flaky:
    """A sink whose first `failures` writes raise."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.records: list[Record] = []
        self.closed = False

    def write(self, record: Record) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no network")
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def record(step: int) -> Record:
    return Record(step, None, {"reward_mean": step / 10})


def end(writer: SinkWriter, timeout_s: float = 5.0) -> module.SinkReport:
    writer.finish()
    return writer.join(timeout_s)


class TestAFailingSink:
    def test_is_tried_again_until_everything_is_there_in_order(self, caplog: pytest.LogCaptureFixture) -> None:
        """Case 62: metrics sink without network; the run goes on, nothing dropped silently."""
        sink = Flaky(failures=2)
        with caplog.at_level(logging.WARNING):
            writer = SinkWriter("flaky", lambda: sink, first_retry_s=0.01)
            for step in range(5):
                writer.put(record(step))
            report = end(writer)
        assert [r.step for r in sink.records] == [0, 1, 2, 3, 4]
        assert (report.written, report.failures, report.pending, report.left_out) == (5, 2, 0, 0)
        assert sink.closed
        assert len(caplog.records) == 1 and "no network" in caplog.text, "warned once, not at each failure"

    def test_that_never_works_is_given_up_at_the_end_and_named(self) -> None:
        writer = SinkWriter("down", lambda: Flaky(failures=10**9), first_retry_s=0.01)
        for step in range(5):
            writer.put(record(step))
        report = end(writer)
        assert (report.written, report.pending) == (0, 5)
        assert report.last_error == "ConnectionError: no network"
        assert not writer._thread.is_alive()

    def test_that_cannot_be_opened_is_opened_later(self) -> None:
        sink, tries = Flaky(failures=0), iter([OSError("disk full"), None])

        def make() -> Flaky:
            if error := next(tries):
                raise error
            return sink

        writer = SinkWriter("late", make, first_retry_s=0.01)
        writer.put(record(0))
        report = end(writer)
        assert (report.written, report.failures) == (1, 1)

    def test_that_hangs_holds_up_nobody(self) -> None:
        release = threading.Event()

        class Hanging(Flaky):
            def write(self, record: Record) -> None:
                release.wait(30)

        writer = SinkWriter("hanging", lambda: Hanging(0))
        for step in range(3):
            writer.put(record(step))
        assert end(writer, timeout_s=0.1).pending == 3
        release.set()

    def test_that_is_far_behind_leaves_out_the_oldest_and_counts_them(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Case 60: many tiny steps; memory flat."""
        monkeypatch.setattr(module, "PENDING_LIMIT", 3)
        writer = SinkWriter("slow", lambda: Flaky(failures=10**9), first_retry_s=0.01)
        for step in range(10):
            writer.put(record(step))
        report = end(writer)
        assert (report.pending, report.left_out) == (3, 7)
        assert caplog.text.count("behind") == 1


class TestTensorBoard:
    def test_numbers_arrive_and_nulls_are_skipped(self, tmp_path: Path) -> None:
        """Case 47: metrics are null; a sink gets no number for them."""
        sinks = MetricSinks(str(tmp_path), LoggingConfig())
        sinks.log(0, {"reward_mean": None, "staleness_mean": 0, "grad_norm": float("nan")}, at_us=1_780_000_000_000_000)
        sinks.log(1, {"reward_mean": 0.25, "staleness_mean": 1})
        [report] = sinks.close()
        assert (report.name, report.written, report.failures, report.pending) == ("tensorboard", 2, 0, 0)
        seen = read_events(tmp_path / "tensorboard")
        assert seen == {"reward_mean": [(1, 0.25)], "staleness_mean": [(0, 0.0), (1, 1.0)]}

    def test_no_secret_of_the_environment_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Case 63: an API key in the environment; found nowhere under the store root."""
        monkeypatch.setenv("WANDB_API_KEY", "a-very-secret-key")
        sinks = MetricSinks(str(tmp_path), LoggingConfig())
        sinks.log(0, {"reward_mean": 1.0})
        sinks.close()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files and not any(b"a-very-secret-key" in path.read_bytes() for path in files)

    def test_remote_stores_and_switched_off_write_no_files(self, tmp_path: Path) -> None:
        assert MetricSinks("s3://bucket/run", LoggingConfig()).close() == []
        assert MetricSinks(str(tmp_path), LoggingConfig(tensorboard=False)).close() == []
        assert list(tmp_path.iterdir()) == []

    def test_a_lost_folder_does_not_end_the_run(self, tmp_path: Path) -> None:
        (tmp_path / "tensorboard").write_text("a file is in the way")
        sinks = MetricSinks(str(tmp_path), LoggingConfig())
        sinks.log(0, {"reward_mean": 1.0})
        [report] = sinks.close()
        assert report.pending == 1 and "FileExistsError" in report.last_error


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
        for tag in sorted(events.Tags()["tensors"])
    }


def test_a_sink_that_is_not_installed_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="pip install trackio"):
        MetricSinks("store", LoggingConfig(tensorboard=False, sinks=["trackio"]))
