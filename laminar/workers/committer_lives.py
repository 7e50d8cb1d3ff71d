"""The committer's process beside a relay: begun again whenever it ends, and told of while it only crashes.

    how it ended, rows committed by then ──CommitterLives──▶ pause before the next start
                                                       └──▶ trouble ──load/relay/<id>──▶ `laminar run`, `laminar status`

A relay goes on with it for ever: rows may be committed by another host's committer, and what keeps this one from it may
pass. Whether the run goes on is up to `laminar run` (`given_up`), which sees all relays.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from laminar.buffer.records import CommitterTrouble, TableHead
from laminar.errors import CoordinationError, CoordinationUnavailable, LaminarError, LeaseLost, StoreError
from laminar.workers.context import Run
from laminar.workers.supervisor.last_error import last_error
from laminar.workers.supervisor.supervision import (
    KILLED,
    LOG_TAIL,
    MAX_BACKOFF_S,
    MAX_FRUITLESS,
    RestartPolicy,
    how_ended,
    sign_off,
)
from laminar.workers.tasks import until_first

log = logging.getLogger(__name__)

AWAY = os.EX_TEMPFAIL
"""Exit code of a committer that ended for want of etcd or of the store."""
LOOK_S = 5.0
"""Seconds between two looks whether rows are committed again."""
SHOWN_CHARACTERS = 300


class Process(Protocol):
    """A process of ours: `children.Child`, or one of a simulator."""

    @property
    def pid(self) -> int: ...

    async def start(self) -> None: ...

    async def wait(self) -> int: ...

    async def stop(self, *, grace_s: float) -> None: ...

    def said(self) -> Sequence[str]:
        """The last lines that it wrote; all of them after `stop`."""
        ...


def exit_code(error: LaminarError) -> int:
    """Of a committer that ends with `error`: AWAY where that is not its own fault. An etcd that is away costs it its
    lease, or its start; storage that is away, full or refuses only its start, since commits wait for it."""
    return AWAY if isinstance(error, (CoordinationUnavailable, LeaseLost, StoreError)) else error.exit_code


@dataclass
class CommitterLives:
    """How the committers beside one relay ended. Pure: what is committed is given."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    trouble: CommitterTrouble | None = None

    def saw(self, rows: int) -> None:
        """`rows`: committed by now, by whichever host's committer. Any more of them forgive all crashes before."""
        if rows != self.policy.fruits:
            self.trouble = None

    def ended(self, code: int, rows: int | None, said: Sequence[str]) -> float:
        """Seconds to wait before the next start. `rows` as of `saw`; None where etcd is away: then nothing is held
        against the committer."""
        if rows is not None:
            self.saw(rows)
        blameless = rows is None or code in (0, AWAY, *KILLED)
        # However short it was: who commits between two crashes gets on, and the others have eight of them in any case.
        pause = self.policy.ended(math.inf, killed=blameless, fruits=self.policy.fruits if rows is None else rows)
        if not blameless:
            error = last_error(said)
            self.trouble = CommitterTrouble(
                crashes=self.policy.fruitless,
                how=f"{how_ended(code)}{f': {error}' if error else ''}",
                said=[line[:SHOWN_CHARACTERS] for line in said[-LOG_TAIL:]],
            )
        return MAX_BACKOFF_S if pause is None else pause


def given_up(committers: Mapping[str, CommitterTrouble | None]) -> str:
    """Why nothing will be committed any more, by what each living relay says of its committer; empty while there is
    hope, for which one that has not crashed so often is enough."""
    hopeless = {relay: t for relay, t in committers.items() if t is not None and t.crashes >= MAX_FRUITLESS}
    if not hopeless or len(hopeless) < len(committers):
        return ""
    relay, trouble = max(hopeless.items(), key=lambda item: item[1].crashes)
    others = f", and so did those of {len(hopeless) - 1} other relays" if len(hopeless) > 1 else ""
    lines = "\n".join(f"  {line}" for line in trouble.said) or "  (it wrote nothing)"
    return (
        f"the committer beside {relay} crashed {trouble.crashes} times with no row committed between them{others}, the "
        f"last time it {trouble.how}. Its last lines:\n{lines}"
    )


async def keep_committer(run: Run, committer: Callable[[], Process], lives: CommitterLives) -> None:
    """Start the committer's process, and start it again when it ends."""
    await until_first(_begin_again(run, committer, lives), _look(run, lives))


async def _begin_again(run: Run, committer: Callable[[], Process], lives: CommitterLives) -> None:
    while True:
        child = committer()
        await child.start()
        try:
            code = await child.wait()
        finally:
            await child.stop(grace_s=5.0)
        pause = lives.ended(code, await _signed_off(run, child.pid), child.said())
        log.warning("the committer's process %s; starting it again in %.1f s", how_ended(code), pause)
        await run.clock.sleep(pause)


async def _signed_off(run: Run, pid: int) -> int | None:
    """Free what the dead process held; the rows committed by then, None if etcd is away."""
    try:
        await sign_off(run.coordination, run.keys, host=run.machine.host, pid=pid)
    except CoordinationUnavailable as e:
        log.info("the committer's lease cannot be revoked, its successor waits until it expires: %s", e)
        return None
    except CoordinationError as e:
        log.error("the committer's lease cannot be revoked, its successor waits until it expires: %s", e)
    return await _committed(run)


async def _look(run: Run, lives: CommitterLives) -> None:
    """A committer that commits again has overcome its crashes, though it has not ended."""
    while True:
        await run.clock.sleep(LOOK_S)
        if lives.trouble is not None and (rows := await _committed(run)) is not None:
            lives.saw(rows)


async def _committed(run: Run) -> int | None:
    """Rows of all tables; None if etcd is away. A head that is unreadable is one that nobody can commit to: it counts
    as none."""
    try:
        heads = (await run.coordination.range(run.keys.heads)).items
    except CoordinationUnavailable as e:
        log.info("how much is committed is not known: %s", e)
        return None
    rows = 0
    for kv in heads:
        try:
            rows += TableHead.parse(kv.value).rows
        except CoordinationError as e:
            log.error("%s: %s", kv.key, e)
    return rows
