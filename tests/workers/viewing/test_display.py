"""What a person sees of a run: the live picture, the plain lines, and the plot, checked as text."""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from laminar.buffer.coordination import Coordination
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.records import (
    Claim,
    CommitterTrouble,
    Cursor,
    Incoming,
    LeaderRecord,
    Load,
    RunManifest,
    Source,
    TrainerHead,
    TrainerProgress,
    WeightsHead,
    WorkerRecord,
)
from laminar.errors import StoreError
from laminar.workers.viewing import render as rendering
from laminar.workers.viewing.display import Display, Event, Snapshot, WorkerView, plain_line, render
from laminar.workers.viewing.inspect import open_store
from laminar.workers.viewing.plot import plot, running_mean
from laminar.workers.viewing.status import RunStatus, read_live, run_status, to_snapshot

SNAPSHOT = Snapshot(
    run="quickstart",
    step=12,
    max_steps=40,
    elapsed_s=83.4,
    reward=0.53125,
    reward_mean_10=0.4,
    staleness_mean=1.25,
    staleness_max=3,
    tokens_per_s=431.7,
    drawn=112,
    consumed=96,
    complete=5,
    in_flight=11,
    workers=(
        WorkerView("rollout-host-11-aaaa", "rollout", 12, 40, 3, 0.456, 431.7),
        WorkerView("rollout-host-12-bbbb", "rollout", 11, 2, 0, 0.01, 12.0, draining=True),
        WorkerView("trainer-host-13-cccc", "trainer", 12, activity="training step 12"),
    ),
    events=(Event(1, "rollout-host-10-dddd died (signal 9); started again"),),
)


def text_of(what: object, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what, highlight=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


class TestPicture:
    def test_everything_is_there_within_80_columns(self) -> None:
        assert text_of(render(SNAPSHOT)).splitlines() == [
            "quickstart ━━━━━━━━━╸                       step 12/40 1:23",
            "reward 0.531 (mean of 10: 0.400)  staleness 1.2 (max 3)  tokens/s 432",
            "groups 112 drawn · 96 consumed · 5 complete, waiting · 11 in flight",
            "worker           version  running  waiting   KV  tokens/s  activity",
            "rollout 11-aaaa       12       40        3  46%       432",
            "rollout 12-bbbb       11        2        0   1%        12  draining",
            "trainer 13-cccc       12        –        –    –         –  training step 12",
            "  rollout-host-10-dddd died (signal 9); started again",
        ]

    def test_before_the_first_step_there_are_no_figures_and_no_crash(self) -> None:
        """Case 47: every response is empty; metrics are null, nothing crashes."""
        text = text_of(render(Snapshot(run="r", max_steps=40)))
        assert "reward – (mean of 10: –)" in text and "step 0/40" in text

    def test_only_the_last_events_are_kept_and_brackets_are_no_markup(self) -> None:
        events = tuple(Event(i, f"[red]event {i}") for i in range(20))
        text = text_of(render(replace(SNAPSHOT, events=events)))
        assert "event 13" not in text and "[red]event 14" in text and "[red]event 19" in text

    def test_a_live_display_restores_the_terminal(self) -> None:
        file = io.StringIO()
        display = Display(plain=False, console=Console(file=file, force_terminal=True, width=80))
        display.plain = False  # under CI too
        with pytest.raises(KeyboardInterrupt), display:
            display.update(SNAPSHOT)
            raise KeyboardInterrupt
        assert "step 12/40" in file.getvalue()
        assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().index("\x1b[?25l")


class TestPlainLines:
    def test_one_line_a_step_one_an_event_and_a_heartbeat(self) -> None:
        file = io.StringIO()
        display = Display(plain=True, console=Console(file=file, width=80))
        with display:
            for elapsed in (83.0, 84.0, 85.0):  # the same step, seen three times
                display.update(replace(SNAPSHOT, elapsed_s=elapsed))
            display.update(replace(SNAPSHOT, elapsed_s=114.0))
            display.update(replace(SNAPSHOT, step=13, elapsed_s=115.0))
        lines = file.getvalue().splitlines()
        assert [line.split(" | ")[0] for line in lines] == [
            "rollout-host-10-dddd died (signal 9); started again",
            "step 12/40",
            "step 12/40",
            "step 13/40",
        ]

    def test_the_line(self) -> None:
        assert plain_line(SNAPSHOT) == (
            "step 12/40 | reward 0.531 | mean10 0.400 | staleness 1.2 max 3 | tokens/s 432 | "
            "groups drawn 112 consumed 96 complete 5 in-flight 11 | elapsed 1:23"
        )

    def test_an_output_on_a_full_disk_does_not_end_the_run(self) -> None:
        """`laminar run … > log` on the disk that fills."""
        full = open("/dev/full", "w")
        with Display(plain=True, console=Console(file=full, width=80)) as display:
            display.update(SNAPSHOT)
            display.update(replace(SNAPSHOT, step=13))
        with pytest.raises(OSError, match="No space left"):
            full.close()

    def test_a_pipe_and_ci_get_plain_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CI", raising=False)
        assert Display(plain=False, console=Console(file=io.StringIO())).plain
        terminal = Console(file=io.StringIO(), force_terminal=True)
        assert not Display(plain=False, console=terminal).plain
        monkeypatch.setenv("CI", "true")
        assert Display(plain=False, console=terminal).plain


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """Address of an etcd of this test's own."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("no etcd here")
    client, peer = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in (client, peer)]
    process = subprocess.Popen(
        [binary, "--data-dir", str(tmp_path / "etcd-data"), "--name", "a", "--initial-cluster", f"a={urls[1]}",
         "--listen-client-urls", urls[0], "--advertise-client-urls", urls[0],
         "--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"127.0.0.1:{client}"
    finally:
        process.kill()
        process.wait(10)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def a_run(coordination: Coordination, store_id: str = "abc") -> None:
    """Twelve groups drawn, eight consumed; one claim in each of groups 10 and 11."""
    keys = Keys("my-run", 2)
    manifest = RunManifest(run="my-run", store="s", store_id=store_id, generation=2, format_version=1)
    claim = Claim(owner="rollout-h-1-aa", term=1, version=4, state="generating", source=Source(worker="w", term=1))
    worker = WorkerRecord(kind="rollout", id="rollout-h-1-aa", host="h", pid=1, started_at_us=0)
    load = Load(
        version=4, running=2, waiting=1, kv_tokens=25, kv_capacity=100, decode_tokens_per_s=50, draining=True,
        moved_out=3, moved_in=2, refilled_tokens=1200,
    )  # fmt: skip
    head = TrainerHead(step=4, decided=5, checkpoint=0, consumed_groups=8, state="running")
    records = {
        Keys("my-run").manifest: manifest,
        keys.cursor: Cursor(next=12, by="x"),
        keys.claim(10, 0): claim,
        keys.claim(11, 1): claim,
        keys.worker("rollout", worker.id): worker,
        keys.worker("trainer", "trainer-h-2-bb"): worker.model_copy(update={"kind": "trainer", "id": "trainer-h-2-bb"}),
        keys.load("rollout", worker.id): load,
        keys.load("trainer", "trainer-h-2-bb"): TrainerProgress(
            step=4, activity="waiting for groups", metrics={"reward_mean": 0.5, "staleness_mean": None},
            rewards={2: 0.1, 3: 0.5},
        ),
        keys.leader("manager"): LeaderRecord(worker="relay-h-3-cc"),
        keys.trainer: head,
        keys.weights: WeightsHead(version=4, digest="d" * 64, layout_digest="l", bytes=2**21, master="relay-h-3-cc"),
        keys.incoming("experience", "s1"): Incoming(table="experience", path="p", rows=7, worker=worker.id),
    }
    for key, record in records.items():
        await coordination.put(key, record.dump())


class TestLiveStatus:
    async def test_etcd_is_read_under_the_newest_generation(self) -> None:
        coordination = MemoryCoordination(MemoryEtcd())
        await a_run(coordination)
        live = await read_live(coordination, "my-run", "abc")
        snapshot = to_snapshot(live, max_steps=40, elapsed_s=10, rewards={0: 0.3, 1: None, 2: 7.0})
        assert (snapshot.step, snapshot.drawn, snapshot.consumed) == (4, 12, 8)
        assert (snapshot.in_flight, snapshot.complete) == (2, 2)
        assert snapshot.reward == 0.5 and snapshot.reward_mean_10 == pytest.approx(0.3)
        assert snapshot.staleness_mean is None and snapshot.tokens_per_s == 50
        assert [(w.kind, w.kv_share, w.draining, w.activity) for w in snapshot.workers] == [
            ("rollout", 0.25, True, ""),
            ("trainer", None, False, "waiting for groups"),
        ]
        text = text_of(rendering.status(RunStatus("my-run", "runs/my-run", 40, live, "", None)), width=100)
        assert "running: 4 steps trained, 5 decided, checkpoint 0" in text
        alone = replace(live, workers=live.workers[:1])
        text_of_it = text_of(rendering.status(RunStatus("my-run", "runs/my-run", 40, alone, "", None)), width=100)
        assert "none is alive: 4 steps trained, 5 decided" in text_of_it
        assert "weights     version 4, digest dddddddddddd, 2.0 MiB" in text
        assert "uncommitted 7 experience" in text and "manager 3-cc" in text
        assert "committer " not in text
        crashed = CommitterTrouble(crashes=3, how="was killed (signal 11)")
        crashing = replace(live, committers={"relay-h-3-cc": crashed, "relay-h-4-dd": None})
        text_of_it = text_of(rendering.status(RunStatus("my-run", "runs/my-run", 40, crashing, "", None)), width=100)
        assert (
            "committer   crash 3 of that beside relay 3-cc since a row was committed: it was killed (signal 11)"
            in text_of_it
        )
        assert "moved       3 handed over by repack, 2 taken over, 1,200 tokens prefilled again" in text

    async def test_a_step_is_shown_once_its_figures_are_known(self) -> None:
        """The trainer raises `step` in etcd a moment before it reports the step's reward: a line must not show the new
        step beside the reward of the one before."""
        coordination = MemoryCoordination(MemoryEtcd())
        await a_run(coordination)
        live = await read_live(coordination, "my-run", "abc")
        assert live.head is not None and live.progress is not None
        ahead = replace(live, head=live.head.model_copy(update={"step": 5}))
        assert [(s.step, s.reward) for s in (to_snapshot(ahead, max_steps=40, elapsed_s=1),)] == [(4, 0.5)]
        new_trainer = replace(ahead, progress=live.progress.model_copy(update={"rewards": {}, "metrics": {}}))
        seen = to_snapshot(new_trainer, max_steps=40, elapsed_s=1, rewards={3: 0.5, 4: 0.6})
        assert (seen.step, seen.reward, seen.reward_mean_10) == (5, 0.6, pytest.approx(0.55))

    async def test_a_running_run_is_found_through_its_endpoint_file(
        self, make_store: Callable[..., Path], etcd: str
    ) -> None:
        root = make_store()
        (root / "etcd").mkdir()
        (root / "etcd" / "endpoint").write_text(etcd)
        coordination = EtcdCoordination([etcd])
        await a_run(coordination, store_id=open_store(str(root)).run.store_id)
        await coordination.close()
        result = await asyncio.to_thread(run_status, open_store(str(root)), [])
        assert result.why_not_live == "" and result.live is not None
        assert result.live.head is not None and result.live.head.step == 4

    async def test_another_run_behind_the_same_port_is_told_apart(self) -> None:
        coordination = MemoryCoordination(MemoryEtcd())
        await a_run(coordination)
        with pytest.raises(StoreError, match="another run took the name or the port"):
            await read_live(coordination, "my-run", "another-store")
        with pytest.raises(StoreError, match="knows no run 'other'"):
            await read_live(coordination, "other")


class TestPlot:
    def test_a_png_appears_as_a_whole(self, make_store: Callable[..., Path], tmp_path: Path) -> None:
        output = tmp_path / "run.png"
        plot(open_store(str(make_store())), output)
        assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 20_000
        assert [path.name for path in tmp_path.glob(".*")] == []

    def test_nothing_to_plot_is_said(self, make_store: Callable[..., Path], tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="nothing to plot"):
            plot(open_store(str(make_store(tables=False))), tmp_path / "run.png")

    def test_a_running_mean_passes_over_missing_steps(self) -> None:
        assert running_mean([None, 1.0, None, 3.0], window=2) == [None, 1.0, 1.0, 3.0]
