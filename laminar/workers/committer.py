"""The committer: elected, in a process of its own, alone in writing to the committed tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from laminar.buffer.commits import TableCommitter
from laminar.buffer.ledger import Ledger
from laminar.buffer.schema import TABLES
from laminar.buffer.session import Election, Leadership
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table
from laminar.errors import CoordinationUnavailable, StoreError
from laminar.workers.context import Member, Run
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.tasks import until_first

log = logging.getLogger(__name__)

GATHER_S = 0.2
"""How long a commit waits for more segments: fewer, larger commits."""
LOOK_AGAIN_S = 5.0
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 10.0


OpenTable = Callable[[Storage, str], Table]


async def commit_always(run: Run, member: Member, leadership: Leadership, open_table: OpenTable) -> None:
    """Commit what is registered, as it comes, under this leadership. Storage or an etcd that are away for a while are
    tried again: leadership, not success, says when to end."""
    ledger = Ledger(run.coordination, run.keys, member.id, leadership)
    committers = [
        TableCommitter(name, schema, open_table(run.storage, name), run.coordination, run.keys, ledger, run.storage)
        for name, schema in TABLES.items()
    ]
    bell = Bell()
    pause = FIRST_RETRY_S
    async with Mirror(run.coordination, run.keys.incoming_root, bell=bell):
        while True:
            rows, failed = await commit_once(committers)
            if failed:
                log.error("trying again in %.1f s: %s", pause, "; ".join(failed))
                await run.clock.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_S)
                continue
            pause = FIRST_RETRY_S
            if rows:
                log.debug("committed %d rows", rows)
                await run.clock.sleep(GATHER_S)
            else:
                await bell.wait(LOOK_AGAIN_S)
                await run.clock.sleep(GATHER_S)


async def commit_once(committers: Sequence[TableCommitter]) -> tuple[int, list[str]]:
    """Rows committed to all tables, and what failed: a table that cannot be written does not hold up the others."""
    rows, failed = 0, []
    for committer in committers:
        try:
            rows += await committer.run_once()
        except StoreError as e:
            failed.append(f"a commit to table {committer.name!r} failed: {e}")
        except CoordinationUnavailable as e:
            failed.append(f"a commit to table {committer.name!r} failed: {e}")
            break  # each of the others would wait for etcd as long
    return rows, failed


async def committer_main(run: Run, member: Member, open_table: OpenTable) -> None:
    """Campaign, then commit until replaced or the lease is lost."""
    election = Election(run.coordination, member.session, run.keys.leader("committer"), member.id)
    leadership = await election.campaign()
    log.info("%s is the committer", member.id)
    await until_first(commit_always(run, member, leadership, open_table), leadership.lost.wait(), member.until_lost())
