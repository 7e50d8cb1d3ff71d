"""The etcd of `laminar run` is started again when it ends, on the same data and ports."""

from __future__ import annotations

import asyncio

from laminar.buffer.files import StorageFull
from laminar.workers.patience import STORE_WAIT_S
from laminar.workers.supervisor.disk import LOOK_AGAIN_S, Tell
from laminar.workers.supervisor.etcd_process import EtcdEnded, EtcdProcess
from laminar.workers.supervisor.supervision import KILLED, RestartPolicy, how_ended


async def restarted(
    etcd: EtcdProcess, tell: Tell, *, wait_s: float = STORE_WAIT_S, look_s: float = LOOK_AGAIN_S
) -> None:
    """Start an etcd that has ended again. One that is killed while it starts, or crashes, is started once more, as a
    worker is. While the disk is full it waits, `wait_s` seconds at most; then it raises StorageFull. Raises
    CoordinationError if etcd crashes again and again, is killed for `wait_s` seconds, or does not serve."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    policy = RestartPolicy()
    waiting = False
    while True:
        started = loop.time()
        try:
            await etcd.restart()
        except StorageFull as e:
            if loop.time() >= deadline:
                raise
            if not waiting:
                tell(f"etcd cannot go on: {e}, or free it now: the run waits for {wait_s / 60:.0f} min")
            waiting = True
            await asyncio.sleep(look_s)
        except EtcdEnded as e:
            pause = policy.ended(loop.time() - started, killed=e.code in KILLED)
            if pause is None or loop.time() >= deadline:
                raise
            tell(f"etcd {how_ended(e.code)} while it started; starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)
        else:
            if waiting:
                tell("there is space again, and etcd serves")
            return
