"""What `laminar worker KIND` runs: joins the run that etcd names, does the kind's work, leaves."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

from laminar.buffer.etcd_access import EtcdAccess
from laminar.errors import ConfigChanged, ConfigError, LaminarError
from laminar.workers.committer_lives import exit_code
from laminar.workers.context import Run, join_run, joined
from laminar.workers.supervisor.children import Child, worker_command

log = logging.getLogger(__name__)

KINDS = ("rollout", "trainer", "relay", "committer")


def run_worker(kind: str, *, access: EtcdAccess, run: str, index: int = 0) -> int:
    """Blocking; the exit code. Raises LaminarError with what went wrong; a committer's says whose fault it was."""
    if kind not in KINDS:
        raise ConfigError(f"there is no worker kind {kind!r}; the kinds are {', '.join(KINDS)}")
    faulthandler.enable()
    try:
        return asyncio.run(_run_worker(kind, access, run))
    except ConfigChanged as e:
        log.info("%s", e)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Not within this process: what the old config made (models, threads, a GPU's memory) goes with its image.
        command = worker_command(kind, access, run)
        os.execv(command[0], command)
    except LaminarError as e:
        if kind == "committer":
            e.exit_code = exit_code(e)
        raise


def configure_logging(level: str) -> None:
    """One line an event on stderr. Libraries speak from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("laminar").setLevel(level)


async def _run_worker(kind: str, access: EtcdAccess, name: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    run = await join_run(access, name)
    configure_logging(run.config.logging.level)
    try:
        work = asyncio.create_task(_work(kind, run, stop, access))
        if kind in ("trainer", "committer"):
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not work.done():
                log.info("stopping: what is not recorded yet is done again from the store")
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                return 0
        await work
        return 0
    finally:
        await run.coordination.close()


async def _work(kind: str, run: Run, stop: asyncio.Event, access: EtcdAccess) -> None:
    if kind == "relay":
        from laminar.workers.chain import relay_transports
        from laminar.workers.relay import relay_main, serve_weights

        command = worker_command("committer", access, run.keys.run)
        await relay_main(run, stop, serve_weights(run), lambda: Child(command, overheard=True), relay_transports)
    elif kind == "committer":
        from laminar.workers.committer import committer_main
        from laminar.workers.tables import open_table

        async with joined(run, "committer") as member:
            await committer_main(run, member, open_table)
    elif kind == "rollout":
        await _rollout(run, stop)
    else:
        await _trainer(run)


async def _rollout(run: Run, stop: asyncio.Event) -> None:
    from laminar.workers.engines import create_engine
    from laminar.workers.rollouts.equipment import equip
    from laminar.workers.rollouts.rollout_lives import rollout_main

    engine = create_engine(run.config, Path(run.file.model_folder))
    starting = asyncio.create_task(equip(run, engine))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        log.info("stopping before the engine has started")
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.close()
        return
    equipment = starting.result()
    try:
        await rollout_main(run, equipment, stop)
    finally:
        await equipment.host.close()
        await engine.close()


async def _trainer(run: Run) -> None:
    from laminar.workers.learning import create_learner
    from laminar.workers.metrics import MetricSinks
    from laminar.workers.tables import open_table
    from laminar.workers.training.trainer_lives import trainer_main

    config = run.config
    sinks = MetricSinks(run.storage.absolute(""), config.logging, run=config.run.name, run_id=run.file.store_id)

    make_learner = partial(create_learner, config, Path(run.file.model_folder))
    tables = {name: open_table(run.storage, name) for name in ("experience", "step_metrics")}
    try:
        async with joined(run, "trainer") as member:
            await trainer_main(run, member, make_learner, tables, sinks)
    finally:
        await asyncio.to_thread(sinks.close)
