"""A rollout process lives through several leases: it joins again when one is lost, and keeps its engine."""

from __future__ import annotations

import asyncio
import logging

from laminar.errors import CoordinationUnavailable, Fenced, LeaseLost
from laminar.workers.context import Run, joined
from laminar.workers.rollout import Rollout
from laminar.workers.rollouts.equipment import Equipment

log = logging.getLogger(__name__)

LEAVE_S = 10.0
"""How long a stopping rollout hands over what it has; its lease is revoked afterwards in any case."""
REJOIN_PAUSE_S = 1.0


async def rollout_main(run: Run, equipment: Equipment, stop: asyncio.Event) -> None:
    """Serve until the run is done or `stop` is set; join again under a new id when a lease is lost or etcd is away:
    the engine, which takes long to start, is kept."""
    while not stop.is_set():
        try:
            async with joined(run, "rollout") as member:
                rollout = Rollout(run, member, equipment)
                serving = asyncio.create_task(rollout.serve())
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if serving.done():
                    serving.result()
                    return
                try:
                    async with asyncio.timeout(LEAVE_S):
                        await rollout.leave()
                except (TimeoutError, CoordinationUnavailable) as e:
                    log.warning("not all trajectories were handed over in %.0f s (%r): the manager does it", LEAVE_S, e)
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
        except (LeaseLost, Fenced) as e:
            log.warning("%s", e)
        except CoordinationUnavailable as e:
            log.warning("joining the run again, as soon as etcd answers: %s", e)
            await run.clock.sleep(REJOIN_PAUSE_S)
