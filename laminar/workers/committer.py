"""The committer: elected, in a process of its own, alone in writing to the committed tables."""

from __future__ import annotations

import logging
from collections.abc import Callable

from laminar.buffer.commits import TableCommitter
from laminar.buffer.ledger import Ledger
from laminar.buffer.schema import TABLES
from laminar.buffer.session import Election, Leadership
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table
from laminar.errors import StoreError
from laminar.workers.context import Member, Run
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.tasks import until_first

log = logging.getLogger(__name__)

GATHER_S = 0.2
"""How long a commit waits for more segments: fewer, larger commits."""
LOOK_AGAIN_S = 5.0


OpenTable = Callable[[Storage, str], Table]


async def commit_always(run: Run, member: Member, leadership: Leadership, open_table: OpenTable) -> None:
    """Commit what is registered, as it comes, under this leadership."""
    ledger = Ledger(run.coordination, run.keys, member.id, leadership)
    committers = [
        TableCommitter(name, schema, open_table(run.storage, name), run.coordination, run.keys, ledger, run.storage)
        for name, schema in TABLES.items()
    ]
    bell = Bell()
    pause = 0.2
    async with Mirror(run.coordination, run.keys.incoming_root, bell=bell):
        while True:
            try:
                rows = sum([await c.run_once() for c in committers])
                pause = 0.2
            except StoreError as e:
                log.error("a commit failed, trying again in %.1f s: %s", pause, e)
                await run.clock.sleep(pause)
                pause = min(2 * pause, 10.0)
                continue
            if rows:
                log.debug("committed %d rows", rows)
                await run.clock.sleep(GATHER_S)
            else:
                await bell.wait(LOOK_AGAIN_S)
                await run.clock.sleep(GATHER_S)


async def committer_main(run: Run, member: Member, open_table: OpenTable) -> None:
    """Campaign, then commit until replaced or the lease is lost."""
    election = Election(run.coordination, member.session, run.keys.leader("committer"), member.id)
    leadership = await election.campaign()
    log.info("%s is the committer", member.id)
    await until_first(commit_always(run, member, leadership, open_table), leadership.lost.wait(), member.until_lost())
