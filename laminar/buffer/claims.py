"""The life of a claim: pure transitions, and the guarded transactions that carry them out.

            draw                    reassigned                 adopted
    (none) ──────▶ generating ─────────────────▶ waiting ─────────────────▶ generating
                     │    ▲                     (owner, term+1;           (source = new owner)
           begin_scoring  │ restarted            source unchanged)
                     ▼    │ (term+1, attempts+1)
                   scoring ──▶ finished: the claim is deleted in the transaction that registers its rows

Invariants: `term` never shrinks, and grows at each change of owner; only `drawn`, `adopted` and `restarted`
set `source`; a claim is deleted only together with the registration of a durable segment that holds its row.
Every transaction compares the actor's own worker or leader key, so that nothing of a worker whose lease has
ended can commit, and each claim's mod_revision, so that exactly one of two racing writers wins.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from laminar.buffer.coordination import (
    MAX_TXN_OPERATIONS,
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Transaction,
    absent,
    unchanged,
)
from laminar.buffer.keys import Keys, parse_trajectory
from laminar.buffer.records import Claim, Cursor, Incoming, Source
from laminar.errors import CoordinationError

MAX_DEATHS = 8
MAX_ATTEMPTS = 3
MAX_FINISH = 100
"""Claims that one finishing transaction may delete: two operations less than etcd's limit each way."""
MAX_DRAW_CLAIMS = 120

NOBODY = "lost"
"""A source that names no worker: there is no log of it, hence nothing yet."""

Cause = Literal["death", "move", "stop"]
TrajectoryId = tuple[int, int]


@dataclass(frozen=True)
class Held:
    """A claim as last seen, with the key's mod_revision that guards the next write to it."""

    claim: Claim
    kv: KeyValue

    @cached_property
    def id(self) -> TrajectoryId:
        return parse_trajectory(self.kv.key)

    @classmethod
    def of(cls, kv: KeyValue) -> Held:
        return cls(Claim.parse(kv.value), kv)


def drawn(owner: str, version: int) -> Claim:
    return Claim(owner=owner, term=1, version=version, state="generating", source=Source(worker=owner, term=1))


def reissued(*, term: int, version: int) -> Claim:
    """A claim of nobody for a trajectory whose own was lost: it begins anew, unless a source is known."""
    return Claim(owner="", term=term, version=version, state="waiting", source=Source(worker=NOBODY, term=0))


def reassigned(claim: Claim, to: str, cause: Cause) -> Claim:
    """The change of owner by death, repack or graceful stop; `to` is empty when nobody can take it yet."""
    return claim.model_copy(
        update={
            "owner": to,
            "term": claim.term + 1,
            "state": "waiting",
            "deaths": claim.deaths + (1 if cause == "death" and claim.owner else 0),
        }
    )


def adopted(claim: Claim, *, version: int, progress: int) -> Claim:
    """The owner has made the source's rows durable in its own log. New tokens since the last owner forgive deaths."""
    return claim.model_copy(
        update={
            "state": "generating",
            "version": version,
            "source": Source(worker=claim.owner, term=claim.term),
            "progress": max(progress, claim.progress),
            "deaths": 0 if progress > claim.progress else claim.deaths,
        }
    )


def restarted(claim: Claim, *, version: int, error: str, counts: bool) -> Claim:
    """Begin the trajectory afresh under a new term; `counts` when an error used up an attempt."""
    return claim.model_copy(
        update={
            "state": "generating",
            "term": claim.term + 1,
            "version": version,
            "source": Source(worker=claim.owner, term=claim.term + 1),
            "progress": 0,
            "attempts": claim.attempts + (1 if counts else 0),
            "last_error": error[:500],
        }
    )


def exhausted(claim: Claim) -> str:
    """Why this claim must be finished with an error instead of being tried again; empty if it may go on."""
    if claim.deaths >= MAX_DEATHS:
        return f"{claim.deaths} owners died without a new token (limit {MAX_DEATHS})"
    if claim.attempts >= MAX_ATTEMPTS:
        return f"{claim.attempts} attempts failed (limit {MAX_ATTEMPTS}): {claim.last_error}"
    return ""


def validate(before: Claim | None, after: Claim | None) -> None:
    """Raise CoordinationError if a transition breaks an invariant above (used by tests and the simulator)."""
    if after is None or before is None:
        return
    if after.term < before.term:
        raise CoordinationError(f"term fell from {before.term} to {after.term}")
    if after.owner != before.owner and after.term == before.term:
        raise CoordinationError(f"owner changed from {before.owner!r} to {after.owner!r} within term {after.term}")
    if after.source.term > after.term:
        raise CoordinationError(f"source term {after.source.term} is ahead of the claim's term {after.term}")
    if after.state != "waiting" and after.source.worker != after.owner:
        raise CoordinationError(f"{after.owner!r} is {after.state} from the log of {after.source.worker!r}")


def complete_groups(cursor: int, open_claims: Iterable[Held]) -> int:
    """Of the first `cursor` groups those of which no trajectory is unfinished. `cursor`: as it was before the claims
    were read, or at that moment."""
    return cursor - len({group for h in open_claims if (group := h.id[0]) < cursor})


def draw_size(room: int, allowed_groups: int, samples_per_prompt: int) -> int:
    """Whole groups that one draw takes: what has room, is admitted, and fits in one transaction."""
    per_transaction = MAX_DRAW_CLAIMS // samples_per_prompt
    return max(0, min(room // samples_per_prompt, allowed_groups, per_transaction))


def admitted_groups(
    *,
    cursor: int,
    consumed: int,
    to_retire: int,
    step: int,
    max_steps: int,
    groups_per_step: int,
    max_ahead: int,
    total_groups: int,
    complete: int = 0,
    max_ready: int,
    version: int = 0,
    max_staleness: int | None = None,
) -> int:
    """Groups that may still be drawn now (design, "Draw"): never further ahead than `max_ahead`, never more than
    the run can consume, and none while `max_ready` of the `complete` ones, at least a step's, wait for the trainer. All
    arguments count groups but `step` and `max_steps`, which count decided steps.

    `max_staleness` (None: no bound) admits what would be no older than that when it is trained on if groups ended in
    the order of drawing: the group k places after the consumed ones then trains in step
    `step + k // groups_per_step`, which is also the trainer's version, and is drawn under `version`. With 0 a step
    needs all that is drawn, so that this is exact. With more, one that ends late keeps its place while others pass it,
    and gets older by each step that they make, without a bound.
    """
    ended = consumed + to_retire
    if complete - ended >= max_ready:
        return 0
    limit = min(ended + max_ahead, ended + (max_steps - step) * groups_per_step, total_groups)
    if max_staleness is not None:
        limit = min(limit, ended + max(0, max_staleness - (step - version) + 1) * groups_per_step)
    return max(0, limit - cursor)


def draw_transaction(
    keys: Keys,
    guard: Compare,
    cursor: KeyValue | None,
    *,
    groups: int,
    samples_per_prompt: int,
    owner: str,
    version: int,
    nonce: str,
) -> Transaction:
    """Not once the run is closed: what was drawn afterwards would never end."""
    first = Cursor.parse(cursor.value).next if cursor else 0
    claim = drawn(owner, version).dump()
    puts: list[Operation] = [Put(keys.cursor, Cursor(next=first + groups, by=nonce).dump())]
    puts += [Put(keys.claim(g, s), claim) for g in range(first, first + groups) for s in range(samples_per_prompt)]
    compares = (guard, unchanged(cursor) if cursor else absent(keys.cursor), absent(keys.closed))
    return Transaction(compares, tuple(puts))


def update_transaction(guard: Compare, held: Held, claim: Claim, *also: Operation) -> Transaction:
    validate(held.claim, claim)
    return Transaction((guard, unchanged(held.kv)), (Put(held.kv.key, claim.dump()), *also))


def hand_over_transaction(
    keys: Keys, guard: Compare, held: Held, claim: Claim, *only_if: Compare
) -> Transaction:
    """A change of owner fills the new owner's inbox in the same transaction. `only_if`: that owner lives, and whatever
    else the change depends on."""
    validate(held.claim, claim)
    compares = (guard, unchanged(held.kv), *only_if)
    operations: list[Operation] = [Put(held.kv.key, claim.dump())]
    if claim.owner:
        operations.append(Put(keys.inbox_item(claim.owner, *held.id), str(claim.term)))
    return Transaction(compares, tuple(operations))


def put_back_transaction(keys: Keys, guard: Compare, held: Held) -> Transaction:
    """The inbox item that a waiting claim should have, if the claim still waits and has none."""
    item = keys.inbox_item(held.claim.owner, *held.id)
    return Transaction((guard, unchanged(held.kv), absent(item)), (Put(item, str(held.claim.term)),))


def finish_transaction(
    keys: Keys, guard: Compare, held: Sequence[Held], segment: str, incoming: Incoming
) -> Transaction:
    """Delete the claims and register their durable rows. At most MAX_FINISH claims."""
    if len(held) > MAX_FINISH or len(held) + 1 > MAX_TXN_OPERATIONS:
        raise CoordinationError(f"a finish of {len(held)} claims exceeds {MAX_FINISH}; split it")
    compares = (guard, *(unchanged(h.kv) for h in held), absent(keys.incoming(incoming.table, segment)))
    deletes: list[Operation] = [Delete(h.kv.key) for h in held]
    return Transaction(compares, (*deletes, Put(keys.incoming(incoming.table, segment), incoming.dump())))


def referenced_versions(claims: Iterable[Claim]) -> list[int]:
    return sorted({c.version for c in claims})


def stranded(claims: Iterable[Held], alive: Container[str], inbox: Container[str], keys: Keys) -> list[Held]:
    """Claims that wait for a living owner who cannot know of them, of one revision of claims and `inbox` (keys), or of
    claims that are older: each must be compared again with what is written."""
    waiting = [h for h in claims if h.claim.state == "waiting" and h.claim.owner in alive]
    return [h for h in waiting if keys.inbox_item(h.claim.owner, *h.id) not in inbox]


def orphans(claims: Mapping[str, Held], alive: set[str]) -> list[Held]:
    """Claims whose owner is gone or empty, in the order of drawing."""
    return [h for _, h in sorted(claims.items()) if h.claim.owner not in alive]
