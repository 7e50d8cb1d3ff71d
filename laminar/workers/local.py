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
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from laminar.buffer.coordination import Coordination, KeyValue
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import RunFile
from laminar.buffer.records import RunManifest, TrainerHead
from laminar.buffer.schema import FORMAT_VERSION
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.errors import ConfigError, CoordinationError, CoordinationUnavailable, LaminarError
from laminar.workers.children import worker_command
from laminar.workers.display import Display, Event
from laminar.workers.etcd_process import EtcdProcess, find_etcd
from laminar.workers.inspect import StoreView
from laminar.workers.preparation import Plan, plan_run, write_plan
from laminar.workers.status import read_state, to_snapshot
from laminar.workers.store_mark import write_mark
from laminar.workers.summary import collect, summary
from laminar.workers.supervision import Supervised, sign_off

log = logging.getLogger(__name__)

REACH_ETCD_S = 10.0
SHOW_INTERVAL_S = 0.5
STOP_GRACE_S = 20.0
DRAIN_S = 60.0


def run(config: Config, *, text: str, dry_run: bool, plain: bool) -> int:
    """Blocking: the whole job. 0 when the run is done, 1 when it failed, 130 when it was stopped."""
    return asyncio.run(_run(config, dry_run=dry_run, plain=plain))


async def _run(config: Config, *, dry_run: bool, plain: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    plan = await plan_run(config)
    if dry_run:
        await _check_etcd(config)
        _say(plan.describe())
        _say("dry run: nothing was started or written")
        return 0
    root = local_folder(plan)
    _say(plan.describe())
    await plan.storage.probe()
    if not plan.storage.local:
        write_mark(root, plan.storage.url, config.storage.model_dump())
    async with coordination_service(config, root) as (access, etcd):
        coordination = access.connect()
        try:
            keys = Keys(config.run.name)
            file, keys = await _enter(plan, coordination, keys)
            job = LocalJob(config, plan, file, coordination, keys, access, root, etcd)
            return await job.run(stop, plain)
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


async def reach(access: EtcdAccess) -> None:
    """Raises ConfigError naming the addresses and the time waited if no etcd answers, or what it refused."""
    coordination = access.connect()
    try:
        async with asyncio.timeout(REACH_ETCD_S):
            await coordination.get("/laminar/")
    except (TimeoutError, CoordinationUnavailable) as e:
        raise ConfigError(
            f"no etcd answers at {access} (waited {REACH_ETCD_S:.0f} s): start it, correct "
            "coordination.endpoints, or leave them empty to run an embedded one"
            + ("" if access.tls() else "; if it speaks TLS, set coordination.ca")
        ) from e
    except CoordinationError as e:
        raise ConfigError(f"etcd at {access} cannot be used: {e}") from e
    finally:
        await coordination.close()


@asynccontextmanager
async def coordination_service(config: Config, root: Path) -> AsyncIterator[tuple[EtcdAccess, EtcdProcess | None]]:
    """The way to the configured etcd, or to one that lives as long as the block."""
    if config.coordination.endpoints:
        access = config.coordination.access()
        await reach(access)
        yield access, None
        return
    folder = root / "etcd"
    mark = folder / "endpoint"
    if mark.exists() and await listens(mark.read_text().strip()):
        raise ConfigError(
            f"the etcd of run {config.run.name!r} is running at {mark.read_text().strip()}: this run is being run by "
            "another `laminar run`; stop that one, or choose another run.name"
        )
    await asyncio.to_thread(find_etcd)  # before anything is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot write to {folder}: {e.strerror}; choose a run.store that can be written") from e
    etcd = EtcdProcess(folder / "data")
    await etcd.start()
    mark.write_text(etcd.endpoint)
    try:
        yield EtcdAccess((etcd.endpoint,)), etcd
    finally:
        await etcd.stop()
        mark.unlink(missing_ok=True)


async def listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(2):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _enter(plan: Plan, coordination: Coordination, keys: Keys) -> tuple[RunFile, Keys]:
    """Make the store and the manifest in etcd agree; a run that was done may be given more steps."""
    kv = await coordination.get(keys.manifest)
    manifest = RunManifest.parse(kv.value) if kv else None
    if manifest is not None:
        keys = Keys(keys.run, manifest.generation)
    head_kv = await coordination.get(keys.trainer)
    head = TrainerHead.parse(head_kv.value) if head_kv else None
    if manifest is not None and (plan.existing is None or plan.existing.store_id != manifest.store_id):
        raise ConfigError(
            f"etcd knows a run {keys.run!r} with its store at {manifest.store} (id {manifest.store_id}), which is not "
            f"{plan.storage.url}: choose another run.name, or restore that store"
        )
    if manifest is None and plan.existing is not None and await _has_begun(plan):
        raise ConfigError(
            f"{plan.storage.url} holds run {plan.existing.run!r}, but this etcd does not know it: point "
            "coordination.endpoints at its etcd, or start another run (run.name)"
        )
    file = await write_plan(plan, SystemClock(), step=head.decided if head else 0)
    if manifest is None:
        record = RunManifest(
            run=keys.run, store=plan.storage.url, storage=plan.config.storage.model_dump(), store_id=file.store_id,
            generation=1, format_version=FORMAT_VERSION,
        )  # fmt: skip
        await coordination.put(keys.manifest, record.dump())
    if head is not None and head.state != "running" and head.decided < plan.config.run.max_steps:
        # A finished run with more steps, or a failed one tried again, goes on where it was.
        again = head.model_copy(update={"state": "running", "reason": ""})
        await coordination.put(keys.trainer, again.dump())
    return file, keys


async def _has_begun(plan: Plan) -> bool:
    """Whether anything was generated. A start that ended between its `run.json` and etcd's manifest is just resumed."""
    folders = ("partials", "incoming", "batches", "checkpoints", "experience.lance")
    return any([await plan.storage.list(folder) for folder in folders])


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
        self.events: list[Event] = []
        self.rewards: dict[int, float | None] = {}
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
                on_event=self._event,
                is_over=self._is_over,
            )
            for name in names
        ]
        self._tasks: set[asyncio.Task[None]] = set()

    def _event(self, text: str) -> None:
        self.events.append(Event(len(self.events), text))

    def _died(self, pid: int) -> None:
        """The kernel already told us of the death: its keys need not wait for the lease to expire."""
        task = asyncio.create_task(self._forget(pid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, pid: int) -> None:
        try:
            await sign_off(self.coordination, self.keys, host=socket.gethostname(), pid=pid)
        except LaminarError as e:
            self._event(f"could not sign off pid {pid}: {e}; its lease does that in time")

    async def _is_over(self) -> bool:
        """False while etcd does not say: a worker that is started again asks for itself, and leaves."""
        try:
            kv = await self.coordination.get(self.keys.trainer)
        except LaminarError as e:
            self._event(f"etcd does not answer: {e}")
            return False
        return kv is not None and TrainerHead.parse(kv.value).state != "running"

    async def run(self, stop: asyncio.Event, plain: bool) -> int:
        working = [asyncio.create_task(w.run(), name=w.name) for w in self.workers]
        background = [asyncio.create_task(self._keep_etcd())]
        with Display(plain=plain) as display:
            try:
                state, reason = await self._watch(stop, working, background, display)
            finally:
                await self._stop_all(background)
                await asyncio.gather(*working, return_exceptions=True)
        store = StoreView.open(self.plan.storage.url, self.config.storage.model_dump())
        _say(summary(await asyncio.to_thread(collect, store, state=state, reason=reason)))
        if state == "failed":
            _say(f"error: {reason}", error=True)
        return {"done": 0, "failed": 1}.get(state, 130)

    async def _watch(
        self, stop: asyncio.Event, working: list[asyncio.Task[None]], background: list[asyncio.Task[None]],
        display: Display,
    ) -> tuple[str, str]:  # fmt: skip
        """Show progress until the run has ended; how it ended, and why."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while not stop.is_set():
            for task in [*working, *background]:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    if isinstance(error, LaminarError):
                        return "failed", str(error)
                    raise error
            try:
                live = await read_state(self.coordination, self.keys)
            except LaminarError as e:
                self._event(f"etcd does not answer: {e}")
                await asyncio.sleep(SHOW_INTERVAL_S)
                continue
            self.rewards |= live.progress.rewards if live.progress else {}
            display.update(
                to_snapshot(
                    live, max_steps=self.config.run.max_steps, elapsed_s=loop.time() - started,
                    rewards=self.rewards, events=self.events,
                )
            )  # fmt: skip
            if live.head is not None and live.head.state != "running":
                await self._drain(working)
                return live.head.state, live.head.reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHOW_INTERVAL_S):
                    await stop.wait()
        self._event("stopping; the same command resumes the run")
        return "stopped", "stopped by a signal"

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
                self._event(f"etcd does not answer: {e}")
            else:
                if not waiting:
                    return
            await asyncio.sleep(0.1)
        log.error("%d segments are still uncommitted after %.0f s; the next start commits them", len(waiting), DRAIN_S)

    async def _keep_etcd(self) -> None:
        """Start the embedded etcd again if it dies; its data and address stay."""
        while self.etcd is not None:
            code = await self.etcd.ended()
            self._event(f"etcd ended with {code}; starting it again on the same data")
            await self.etcd.restart()
        await asyncio.Event().wait()

    async def _stop_all(self, background: list[asyncio.Task[None]]) -> None:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        # Rollouts and trainer first: the relay's committer takes what they registered last.
        for kinds in (("rollout", "trainer"), ("relay",)):
            await asyncio.gather(*(w.stop(STOP_GRACE_S) for w in self.workers if w.kind in kinds))


def _say(text: str, *, error: bool = False) -> None:
    stream = sys.stderr if error else sys.stdout
    stream.write(text + os.linesep)
    stream.flush()
