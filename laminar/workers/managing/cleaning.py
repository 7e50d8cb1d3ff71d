"""Removing what nothing refers to: the manager's part of keeping a run bounded.

| what                                    | goes when                                                         |
|-----------------------------------------|-------------------------------------------------------------------|
| partial logs                            | their writer is gone, and no claim's source names it              |
| incoming segments and their copies      | not registered, and their writer is gone or they are an hour old  |
| batch files of decided steps            | no kept checkpoint needs them (`trainer.keep_batches`)            |
| batch files that were never decided     | their writer is gone                                              |
| decisions, offers, closings in etcd,    | a block of `archive.BLOCK` steps is archived that no checkpoint,  |
| copies of decisions                     | claim or evaluation needs                                         |
| inboxes, moves, rests                   | their worker is gone                                              |
| temporary files                         | they are an hour old                                              |

What the committer commits it deletes itself; it compacts the tables and drops their old versions (`commits.py`).
Everything here stays true once it is: a manager that was replaced while it cleaned does no harm, and one from which a
recovery took the run deletes nothing more. Order matters: files and keys are listed first, then the living, then what
refers to files. A worker that is not among the living never returns, so whatever could still name its files exists by
then; and none whose key was listed has yet to join.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

from laminar.buffer.archive import BLOCK, ArchivedStep, archived_before, archived_paths, write_block
from laminar.buffer.coordination import Delete, KeyValue, Transaction
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger, all_claims
from laminar.buffer.records import BatchDecision, Incoming
from laminar.buffer.steps import StepLog, closing_path, decision_path, oldest_checkpoint
from laminar.buffer.storage import FileInfo, NotFound
from laminar.workers.context import Run

log = logging.getLogger(__name__)

STALE_S = 3600.0
"""No write and no registration takes an hour: a temporary file that old has lost its writer, and a segment that old,
which is not registered, was committed or will never be."""
DELETES = 100
"""Keys deleted in one transaction."""
BATCH_FILE = re.compile(r"batches/(closing-)?(\d+)(?:-\d{3})?-(.+)\.arrow")


class Cleaner:
    """`ledger.actor` is the manager's leadership."""

    def __init__(self, run: Run, ledger: Ledger) -> None:
        self.run_info = run
        self.storage = run.storage
        self.coordination = run.coordination
        self.keys = run.keys
        self.ledger = ledger
        self.steps = StepLog(run.coordination, run.keys, ledger, run.storage)
        self._decided: set[str] = set()
        self._folded_before = -1
        self._temporary_at = 0.0

    async def clean(self) -> int:
        """Delete what nothing refers to; the number of files, logs and keys deleted."""
        logs = {f.path.split("/")[1] for f in await self.storage.list("partials")}
        segments = await self.storage.list("incoming")
        batches = [f.path for f in await self.storage.list("batches")]
        oldest = oldest_checkpoint(f.path for f in await self.storage.list("checkpoints"))
        living = await self._living()
        deleted = await self._partial_logs(logs - living)
        deleted += await self._segments(segments, living)
        deleted += await self._batches(batches, living, oldest)
        deleted += await self._fold(oldest)
        deleted += await self._of_the_dead()
        deleted += await self._temporary()
        if deleted:
            log.info("removed %d files and keys that nothing refers to", deleted)
        return deleted

    async def _partial_logs(self, of_the_dead: set[str]) -> int:
        if not of_the_dead:
            return 0
        held = await all_claims(self.coordination, self.keys)
        unnamed = of_the_dead - {h.claim.source.worker for h in held.values()}
        for worker in sorted(unnamed):
            await self.ledger.check_fence()
            await self.storage.delete_tree(f"partials/{worker}")
        return len(unnamed)

    async def _segments(self, segments: Sequence[FileInfo], living: set[str]) -> int:
        records = (await self.coordination.range(self.keys.incoming_root)).items
        registered = {path for kv in records for path in Incoming.parse(kv.value).files}
        oldest = self._stale_before()
        deleted = 0
        for file in segments:
            if file.path in registered or (written_by(file.path, living) and file.modified_us >= oldest):
                continue
            await self._delete_file(file.path)
            deleted += 1
        return deleted

    async def _delete_file(self, path: str) -> None:
        """Raises Fenced where a recovery has taken the run from this manager: that removed the keys which say what is
        in use, and it was fenced out before."""
        await self.ledger.check_fence()
        await self.storage.delete(path)

    def _stale_before(self) -> int:
        return self.run_info.clock.now_us() - int(STALE_S * 1e6)

    async def _temporary(self) -> int:
        """Files whose writer died while it wrote them. A look at the whole store, so only now and then."""
        now = self.run_info.clock.monotonic()
        if now < self._temporary_at:
            return 0
        self._temporary_at = now + STALE_S / 4
        oldest = self._stale_before()
        old = [f for f in await self.storage.list("", temporary=True) if f.modified_us < oldest]
        for file in old:
            await self.storage.delete(file.path)
        return len(old)

    async def _of_the_dead(self) -> int:
        """Who lives is asked anew, after these keys were listed: workers have joined while files were deleted, and an
        inbox item that is lost strands its claim, which no sweep looks for while the owner lives."""
        owners: dict[str, str] = {}
        for root in (self.keys.inbox_root, self.keys.moves_root, self.keys.rests_root):
            items = (await self.coordination.range(root)).items
            owners |= {kv.key: kv.key[len(root) :].split("/")[0] for kv in items}
        living = await self._living()
        return await self._delete_keys([key for key, worker in owners.items() if worker not in living])

    async def _living(self) -> set[str]:
        return {name(kv) for kv in (await self.coordination.range(self.keys.workers_root)).items}

    async def _delete_keys(self, keys: Sequence[str]) -> int:
        for start in range(0, len(keys), DELETES):
            deletes = tuple(Delete(key) for key in keys[start : start + DELETES])
            if not (await self.coordination.transact(Transaction((self.ledger.actor.guard(),), deletes))).succeeded:
                await self.ledger.check_fence()
        return len(keys)

    # -- steps --------------------------------------------------------------------------------------------------

    async def _batches(self, paths: Sequence[str], living: set[str], oldest: int) -> int:
        keep_all = self.run_info.config.trainer.keep_batches == "all"
        deleted = 0
        for path in paths:
            match = BATCH_FILE.fullmatch(path)
            if match is None:
                continue
            old = int(match[2]) < oldest and not keep_all
            if old or (match[3] not in living and not await self._is_decided(path, bool(match[1]), int(match[2]))):
                await self._delete_file(path)
                deleted += 1
        return deleted

    async def _is_decided(self, path: str, closing: bool, step: int) -> bool:
        if path in self._decided:
            return True
        if closing:
            self._decided.update(decision.file for decision in await self.steps.closings())
        else:
            try:
                self._decided.add((await self.steps.decision(step)).file)
            except NotFound:
                return False
        return path in self._decided

    async def _fold(self, oldest: int) -> int:
        """Move decisions that no restart needs from etcd and their copies to the archive, a whole block at a time."""
        archived = archived_before(await archived_paths(self.storage))
        bound = await self._foldable_before(oldest)
        if archived + BLOCK > bound and self._folded_before == archived:
            return 0
        keys = (await self.coordination.range(self.keys.batches)).items
        offers = (await self.coordination.range(self.keys.offers)).items
        decided = {d.step: d for d in (BatchDecision.parse(kv.value) for kv in keys)}
        while archived + BLOCK <= bound:
            block = range(archived, archived + BLOCK)
            if missing := [step for step in block if step not in decided]:
                log.error("%d decisions from step %d on are not in etcd: not archived", len(missing), missing[0])
                break
            offered = {step: digests_of(offers, self.keys, step) for step in block}
            path = await write_block(
                self.storage, [ArchivedStep(decision=decided[step], offered=offered[step]) for step in block]
            )
            log.info("archived the decisions of steps %d to %d in %s", block[0], block[-1], path)
            archived += BLOCK
        deleted = await self._forget_before(archived, [*keys, *offers])
        self._folded_before = archived
        return deleted

    async def _foldable_before(self, oldest: int) -> int:
        """Steps that are recorded, and versions that no checkpoint, claim or evaluation can need any more."""
        head = await self.ledger.trainer_head()
        if head is None:
            return 0
        held = await all_claims(self.coordination, self.keys)
        requests = (await self.coordination.range(self.keys.evaluations)).items
        needed = [h.claim.version for h in held.values()] + [int(name(kv)) for kv in requests]
        return min([head.step, oldest, *needed])

    async def _forget_before(self, archived: int, items: Sequence[KeyValue]) -> int:
        closings = (await self.coordination.range(self.keys.closings)).items
        for kv in closings:
            if not await self.storage.exists(closing_path(kv.key)):
                await self.storage.write(closing_path(kv.key), kv.value.encode(), overwrite=True)
        stale = [kv.key for kv in (*items, *closings) if step_of(kv.key, self.keys) < archived]
        deleted = await self._delete_keys(stale)
        copies = {f.path for f in await self.storage.list("batches")}
        for path in sorted(copies & {decision_path(step) for step in range(archived)}):
            await self.storage.delete(path)
            deleted += 1
        return deleted


def name(kv: KeyValue) -> str:
    return kv.key.rsplit("/", 1)[-1]


def written_by(path: str, workers: Iterable[str]) -> bool:
    return any(worker in path for worker in workers)


def step_of(key: str, keys: Keys) -> int:
    """The step or version that a key of `batches/`, `closings/` or `offers/` begins with."""
    root = next(r for r in (keys.batches, keys.closings, keys.offers) if key.startswith(r))
    return int(re.split(r"[-/]", key[len(root) :])[0])


def digests_of(offers: Sequence[KeyValue], keys: Keys, version: int) -> list[str]:
    return [name(kv) for kv in offers if kv.key.startswith(keys.offers_of(version))]
