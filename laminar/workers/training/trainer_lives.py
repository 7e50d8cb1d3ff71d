"""A trainer process: ready to train when it is elected, then one life as the leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from laminar.buffer.session import Election, Leadership
from laminar.buffer.space import disk_full
from laminar.buffer.storage import StorageFull
from laminar.buffer.table import Table
from laminar.errors import Fenced
from laminar.workers.context import Member, Run
from laminar.workers.metrics import MetricSinks
from laminar.workers.patience import StoreAway
from laminar.workers.tasks import until_first
from laminar.workers.trainer import Trainer

log = logging.getLogger(__name__)


async def trainer_main(
    run: Run, member: Member, make_learner: Any, tables: Mapping[str, Table], sinks: MetricSinks
) -> None:
    """Load the model, campaign for the leadership, then train until the run is done: who stands by is ready to train
    when it is elected. `tables` as of `Trainer`. Raises ConfigChanged when a resume changes the config, before or after
    the election."""
    await until_first(_lead(run, member, make_learner, tables, sinks), member.until_changed())


async def _lead(
    run: Run, member: Member, make_learner: Any, tables: Mapping[str, Table], sinks: MetricSinks
) -> None:
    learner = await asyncio.to_thread(make_learner)
    election = Election(run.coordination, member.session, run.keys.leader("trainer"), member.id)
    leadership = await election.campaign()
    log.info("%s leads the training", member.id)
    trainer = Trainer(run, member, leadership, learner, tables, sinks)
    await until_first(
        run_or_fail(trainer),
        trainer.report(),
        trainer.publisher.keeper.run(),
        member.until_lost(),
        _replaced(member, leadership),
    )


async def run_or_fail(trainer: Trainer) -> None:
    """A store that stayed full, or away, ends the run: started again and again, trainers would each wait as long."""
    try:
        await trainer.run()
    except StorageFull as e:
        storage = trainer.run_info.storage
        reason = disk_full(storage.absolute("")) if storage.local else f"{e}; free space and run the same command again"
        await trainer.steps.change_head(state="failed", reason=reason)
        raise
    except StoreAway as e:
        await trainer.steps.change_head(state="failed", reason=f"{e}; run the same command again once it serves")
        raise


async def _replaced(member: Member, leadership: Leadership) -> None:
    await leadership.lost.wait()
    raise Fenced(f"{member.id} no longer leads the training")
