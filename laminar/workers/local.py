"""`laminar run`: one machine's whole job. Starts etcd, a relay, rollouts and a trainer, each a process of its own,
starts again what dies, shows progress, and leaves no process behind.

    supervisor ─┬─ etcd            (unless the config names one)
                ├─ relay ── committer
                ├─ rollout × n ── engine, scoring processes
                └─ trainer
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import Literal

from laminar.buffer.coordination import Coordination, KeyValue
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import RunFile
from laminar.buffer.records import TrainerHead
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.errors import LaminarError, StoreError
from laminar.relay.binding import make_private
from laminar.workers.chain import check_listening
from laminar.workers.committer_lives import given_up
from laminar.workers.relay import socket_folder
from laminar.workers.supervisor.children import worker_command
from laminar.workers.supervisor.disk import watch_disk
from laminar.workers.supervisor.ending import Ending, forget_ending, write_ending
from laminar.workers.supervisor.entering import enter
from laminar.workers.supervisor.etcd_process import EtcdProcess, find_etcd
from laminar.workers.supervisor.etcd_restarts import restarted
from laminar.workers.supervisor.etcd_upkeep import Upkeep
from laminar.workers.supervisor.exclusion import Supervision, only_supervisor
from laminar.workers.supervisor.hung import HUNG_S, Hung
from laminar.workers.supervisor.preparation import Plan, plan_run
from laminar.workers.supervisor.run_etcd import coordination_service, reach
from laminar.workers.supervisor.store_mark import write_mark
from laminar.workers.supervisor.supervision import Supervised, sign_off, uncounted
from laminar.workers.viewing.display import Display, write_line
from laminar.workers.viewing.inspect import StoreView
from laminar.workers.viewing.status import LiveStatus, read_live
from laminar.workers.viewing.story import EventHandler, Story
from laminar.workers.viewing.summary import collect, summary

log = logging.getLogger(__name__)

SHOW_INTERVAL_S = 0.5
ETCD_SILENT_S = 3.0
"""An etcd that takes longer for one look counts as away, as far as the display goes."""
ETCD_GONE_S = 600.0
"""After so long without etcd the run ends, and the same command resumes it."""
STOP_GRACE_S = 20.0
DRAIN_S = 60.0
State = Literal["done", "stopped", "failed"]


def run(config: Config, *, text: str, dry_run: bool, plain: bool) -> int:
    """Blocking: the whole job. 0 when the run is done, 1 when it failed; 130 when Ctrl-C stopped it, 143 when SIGTERM
    did, as shells count."""
    return asyncio.run(_run(config, dry_run=dry_run, plain=plain))


async def _run(config: Config, *, dry_run: bool, plain: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def asked(number: int) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked, number)
    plan = await plan_run(config)
    await check_listening(config.relay)
    await _check_etcd(config)
    if dry_run:
        _say(plan.describe())
        _say("dry run: nothing was started or written")
        return 0
    make_private(socket_folder())
    root = local_folder(plan)
    _say(plan.describe())
    await plan.storage.probe()
    if not plan.storage.local:
        write_mark(root, plan.storage.url, config.storage.model_dump())
    async with coordination_service(config, root) as (access, etcd):
        coordination = access.connect()
        try:
            keys = Keys(config.run.name)
            hold = only_supervisor(coordination, keys, SystemClock(), config.coordination.lease_ttl)
            async with hold as supervision:
                file, keys = await enter(plan, coordination, keys, supervision)
                job = LocalJob(config, plan, file, coordination, keys, access, root, etcd)
                state = await job.run(stop, plain, supervision)
                return 128 + signals[0] if state == "stopped" else int(state == "failed")
        finally:
            await coordination.close()


def local_folder(plan: Plan) -> Path:
    """Where this machine's own files of the run lie (etcd's data, logs): under the store if that is a local disk."""
    return Path(plan.storage.absolute("")) if plan.storage.local else Path("runs") / plan.config.run.name


async def _check_etcd(config: Config) -> None:
    if config.coordination.endpoints:
        await reach(config.coordination.access())
    else:
        await asyncio.to_thread(find_etcd)


class LocalJob:
    """The supervised processes of one run on this machine."""

    def __init__(
        self, config: Config, plan: Plan, file: RunFile, coordination: Coordination, keys: Keys, access: EtcdAccess,
        root: Path, etcd: EtcdProcess | None,
    ) -> None:  # fmt: skip
        self.config = config
        self.plan = plan
        self.file = file
        self.coordination = coordination
        self.keys = keys
        self.root = root
        self.etcd = etcd
        self.story = Story(keys.run, config.run.max_steps, asyncio.get_running_loop().time)
        self.clock = SystemClock()
        self.hung = Hung(HUNG_S)
        self.ending = False
        self._trained: int | None = None
        logs = root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        names = ["relay", *(f"rollout-{i}" for i in range(config.rollout.workers)), "trainer"]
        self.workers = [
            Supervised(
                kind=name.split("-")[0],
                name=name,
                command=worker_command(name.split("-")[0], access, keys.run),
                log_file=logs / f"{name}.log",
                on_end=self._died,
                on_event=self.story.event,
                is_over=self._is_over,
                may_start=self._etcd_serves,
                excused=lambda: self._etcd_is_away() or self.story.etcd_was_away,
                fruits=(lambda: self._trained) if name == "trainer" else uncounted,
            )
            for name in names
        ]
        self._tasks: set[asyncio.Task[None]] = set()

    def _died(self, pid: int) -> None:
        """The kernel already told us of the death: its keys need not wait for the lease to expire."""
        task = asyncio.create_task(self._forget(pid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, pid: int) -> None:
        try:
            await sign_off(self.coordination, self.keys, host=socket.gethostname(), pid=pid)
        except LaminarError as e:
            log.debug("could not sign off pid %d, its lease does that in time: %s", pid, e)

    async def _is_over(self) -> bool:
        """False while etcd does not say: a worker that is started again asks for itself, and leaves."""
        try:
            kv = await self.coordination.get(self.keys.trainer)
        except LaminarError as e:
            self.story.away(str(e))
            return False
        return kv is not None and TrainerHead.parse(kv.value).state != "running"

    async def _etcd_serves(self) -> None:
        """Wait, while the run goes on, until etcd is there. How long that may take `_watch` decides."""
        while not self.ending and self._etcd_is_away():
            await self.clock.sleep(SHOW_INTERVAL_S)

    def _etcd_is_away(self) -> bool:
        return self.story.outage.on or (self.etcd is not None and self.etcd.returncode is not None)

    async def run(self, stop: asyncio.Event, plain: bool, supervision: Supervision) -> State:
        await forget_ending(self.plan.storage)
        handler = EventHandler(self.story)
        logging.getLogger("laminar").addHandler(handler)
        try:
            state, reason = await self._work(stop, plain, supervision)
        finally:
            logging.getLogger("laminar").removeHandler(handler)
        try:
            await write_ending(self.plan.storage, Ending(state=state, reason=reason, at_us=SystemClock().now_us()))
        except StoreError as e:
            _say(f"how the run ended could not be noted: {e}", error=True)
        told_below = "" if state == "failed" else reason
        try:
            store = await asyncio.to_thread(StoreView.open, self.plan.storage.url, self.config.storage.model_dump())
            _say(summary(await asyncio.to_thread(collect, store, state=state, reason=told_below)))
        except StoreError as e:
            _say(f"the run cannot be summed up: {e}", error=True)
        if state == "failed":
            _say(f"error: {reason}", error=True)
        return state

    async def _work(self, stop: asyncio.Event, plain: bool, supervision: Supervision) -> tuple[State, str]:
        """The run, from the start of its workers until all have ended; how it ended, and why."""
        working = [asyncio.create_task(w.run(), name=w.name) for w in self.workers]
        tasks = (self._keep_etcd(), self._maintain_etcd(), watch_disk(self.root, self.story.event), supervision.keep())
        background = [asyncio.create_task(task) for task in tasks]
        with Display(plain=plain) as self.story.display:
            try:
                return await self._watch(stop, working, background)
            finally:
                await self._stop_all(background)
                await asyncio.gather(*working, return_exceptions=True)
                self.story.refresh()
                self.story.display = None

    async def _watch(
        self, stop: asyncio.Event, working: list[asyncio.Task[None]], background: list[asyncio.Task[None]]
    ) -> tuple[State, str]:
        """Show progress until the run has ended; how it ended, and why."""
        while not stop.is_set():
            for task in [*working, *background]:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    if isinstance(error, LaminarError):
                        return "failed", str(error)
                    raise error
            try:
                async with asyncio.timeout(ETCD_SILENT_S):
                    live = await read_live(self.coordination, self.keys.run, self.file.store_id)
            except (LaminarError, TimeoutError) as e:
                if self.story.away(str(e) or f"no answer within {ETCD_SILENT_S:g} s") > ETCD_GONE_S:
                    return "failed", f"etcd has not answered for {ETCD_GONE_S:.0f} s; start it and run this again ({e})"
            else:
                self.keys = Keys(self.keys.run, live.generation)
                self._trained = live.head.step if live.head is not None else 0
                self.story.show(live)
                self._end_hung(live)
                if live.head is not None and live.head.state == "failed":
                    return "failed", live.head.reason
                if live.head is not None and live.head.state == "done":
                    await self._drain(working)
                    return "done", live.head.reason
                if reason := given_up(live.committers):
                    return "failed", reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHOW_INTERVAL_S):
                    await stop.wait()
        self.story.event("stopping; the same command resumes the run")
        self.story.refresh()
        return "stopped", "stopped by a signal"

    def _end_hung(self, live: LiveStatus) -> None:
        here = socket.gethostname()
        joined = {pid for host, pid in live.processes if host == here}
        by_pid = {w.pid: w for w in self.workers if w.pid}
        for pid in self.hung.look(by_pid.keys(), joined, self.clock.monotonic()):
            by_pid[pid].end(f"has not been in the run for {HUNG_S:.0f} s, though its process lives")

    async def _drain(self, working: list[asyncio.Task[None]]) -> None:
        """The run has ended: rollouts and trainer leave by themselves, the committer commits what is registered."""
        for w in self.workers:
            w.stopping = True
        leaving = [t for t, w in zip(working, self.workers, strict=True) if w.kind != "relay"]
        await asyncio.wait(leaving, timeout=DRAIN_S)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DRAIN_S
        waiting: tuple[KeyValue, ...] = ()
        while loop.time() < deadline:
            try:
                waiting = (await self.coordination.range(self.keys.incoming_root)).items
            except LaminarError as e:
                self.story.away(str(e))
            else:
                if not waiting:
                    return
            await asyncio.sleep(0.1)
        log.error("%d segments are still uncommitted after %.0f s; the next start commits them", len(waiting), DRAIN_S)

    async def _keep_etcd(self) -> None:
        """Start the embedded etcd again if it dies; its data and address stay."""
        while self.etcd is not None:
            code = await self.etcd.ended()
            self.story.event(f"etcd ended with {code}; starting it again on the same data")
            await restarted(self.etcd, self.story.event)
        await asyncio.Event().wait()

    async def _maintain_etcd(self) -> None:
        """Keep the embedded etcd within its space."""
        if self.etcd is None:
            return
        client = EtcdCoordination([self.etcd.endpoint])
        try:
            await Upkeep(client, self.etcd.quota_bytes, SystemClock(), self.story.event).run()
        finally:
            await client.close()

    async def _stop_all(self, background: list[asyncio.Task[None]]) -> None:
        self.ending = True
        for w in self.workers:
            w.stopping = True
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        # Rollouts and trainer first: the relay's committer takes what they registered last.
        for kinds in (("rollout", "trainer"), ("relay",)):
            await asyncio.gather(*(w.stop(STOP_GRACE_S) for w in self.workers if w.kind in kinds))


def _say(text: str, *, error: bool = False) -> None:
    write_line(sys.stderr if error else sys.stdout, text)
