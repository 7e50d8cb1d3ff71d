"""One trajectory in its owner's memory: what was generated, and what of it is not yet in the log."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from laminar.buffer.claims import Held
from laminar.buffer.partials import Partial, PartialRow, Span
from laminar.workers.environments.base import Message

TurnState = Literal["generating", "acting", "scoring"]


@dataclass
class Trajectory:
    """Mutable; only its owner's tasks touch it. Token lists after the first prompt have equal lengths.

    `pending` holds rows that the owner's log does not have yet (`outbox.Flusher` writes them).
    """

    held: Held
    worker: str
    version: int
    digest: str
    started_at: int
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turn: int = 0
    turn_state: TurnState = "generating"
    finish_reason: str | None = None
    environment_state: str = ""
    messages: list[Message] = field(default_factory=list)
    pending: list[PartialRow] = field(default_factory=list)
    request: str = ""
    """Id of its request in the engine; empty when there is none."""
    halting: bool = False
    """Stop where somebody else, or other weights, can go on: `Generation` ends it with `Halted`."""
    aborted: bool = False
    """Its request was aborted here, so that it may end without being finished."""
    policy_tokens: int = 0
    """How many of its tokens the policy wrote; counted along, since reports ask for it four times a second."""

    @property
    def id(self) -> tuple[int, int]:
        return self.held.id

    @property
    def name(self) -> str:
        return "{:012d}-{:03d}".format(*self.id)

    def begin(self, prompt_ids: Sequence[int], messages: Sequence[Message], state: str, at: int) -> None:
        """The first prompt; it is logged, so that a new owner need not ask the environment again."""
        self.prompt_ids = list(prompt_ids)
        self.messages = list(messages)
        self.environment_state = state
        self._log("prompt", self.prompt_ids, [], at, offset=0)

    def policy_wrote(self, token_ids: Sequence[int], logprobs: Sequence[float], at: int) -> None:
        if not token_ids:
            return
        offset = len(self.token_ids)
        last = self.spans[-1] if self.spans else None
        if last is None or (last.version, last.worker, last.digest) != (self.version, self.worker, self.digest):
            self.spans.append(Span(offset, self.version, self.worker, self.digest))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.policy_mask += [True] * len(token_ids)
        self.policy_tokens += len(token_ids)
        if self.pending and self._goes_on(self.pending[-1], offset):
            # A row for each token would cost more than all the rest of streaming: one grows until it is flushed.
            row = self.pending[-1]
            row.token_ids += token_ids
            row.logprobs += logprobs
            row.at = at
        else:
            self._log("policy", token_ids, logprobs, at, offset=offset)

    def generation_ended(self, reason: str, at: int) -> None:
        """From here on nobody may generate in this turn again, once the row is durable."""
        self.finish_reason = reason
        self._mark("acting", at)

    def environment_replied(
        self, token_ids: Sequence[int], messages: Sequence[Message], state: str, reply: str, at: int
    ) -> None:
        self.messages += [{"role": "assistant", "content": reply}, *messages]
        self.environment_state = state
        self.turn += 1
        self.turn_state = "generating"
        self.finish_reason = None
        offset = len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.policy_mask += [False] * len(token_ids)
        self._log("environment", token_ids, [], at, offset=offset)

    def ready_to_score(self, reason: str, state: str, reply: str, at: int) -> None:
        self.finish_reason = reason
        self.environment_state = state
        self.messages = [*self.messages, {"role": "assistant", "content": reply}]
        self._mark("scoring", at)

    def _mark(self, state: TurnState, at: int) -> None:
        self.turn_state = state
        self._log("policy", [], [], at, offset=len(self.token_ids))

    def _log(self, role: str, token_ids: Sequence[int], logprobs: Sequence[float], at: int, *, offset: int) -> None:
        self.pending.append(self._row(role, token_ids, logprobs, at, offset))

    def _row(
        self,
        role: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        at: int,
        offset: int,
        by: Span | None = None,
    ) -> PartialRow:
        group, sample = self.id
        return PartialRow(
            group=group,
            sample=sample,
            term=self.held.claim.term,
            turn=self.turn,
            offset=offset,
            role=role,
            token_ids=list(token_ids),
            logprobs=list(logprobs),
            version=by.version if by else self.version,
            digest=by.digest if by else self.digest,
            worker=by.worker if by else self.worker,
            finish_reason=self.finish_reason,
            turn_state=self.turn_state,
            # Streamed tokens do not change the environment: its state rides on the rows that do.
            environment_state=None if role == "policy" and token_ids else self._kept_state(),
            started_at=self.started_at,
            at=at,
        )

    def _kept_state(self) -> str:
        return json.dumps({"state": self.environment_state, "messages": self.messages})

    def _goes_on(self, row: PartialRow, offset: int) -> bool:
        """Whether policy tokens at `offset` can be added to this pending row."""
        return (
            row.role == "policy"
            and bool(row.token_ids)
            and row.offset + len(row.token_ids) == offset
            and row.term == self.held.claim.term
            and (row.version, row.worker, row.digest) == (self.version, self.worker, self.digest)
            and (row.turn, row.turn_state, row.finish_reason) == (self.turn, self.turn_state, self.finish_reason)
        )

    def take_pending(self) -> list[PartialRow]:
        """Rows for the log since the last call; from now on they do not change."""
        rows, self.pending = self.pending, []
        return rows

    def all_rows(self, at: int) -> list[PartialRow]:
        """Everything again under this owner's term: what an adoption or a rotation of the log writes."""
        rows = [self._row("prompt", self.prompt_ids, [], at, 0)] if self.prompt_ids else []
        for start, stop, policy in _runs(self.policy_mask, [s.start for s in self.spans]):
            rows.append(
                self._row(
                    "policy" if policy else "environment",
                    self.token_ids[start:stop],
                    self.logprobs[start:stop] if policy else [],
                    at,
                    start,
                    self._span_of(start) if policy else None,
                )
            )
        return [*rows, self._row("policy", [], [], at, len(self.token_ids))] if self.prompt_ids else rows

    def _span_of(self, offset: int) -> Span:
        return next(s for s in reversed(self.spans) if s.start <= offset)

    def partial(self) -> Partial:
        return Partial(
            prompt_ids=list(self.prompt_ids),
            token_ids=list(self.token_ids),
            policy_mask=list(self.policy_mask),
            logprobs=list(self.logprobs),
            spans=list(self.spans),
            turn=self.turn,
            turn_state=self.turn_state,
            environment_state=self._kept_state(),
            finish_reason=self.finish_reason,
            started_at=self.started_at,
        )

    def restore(self, partial: Partial) -> None:
        """Go on from what another owner had made durable; nothing of it is pending until `all_rows` is logged."""
        self.prompt_ids = list(partial.prompt_ids)
        self.token_ids = list(partial.token_ids)
        self.policy_mask = list(partial.policy_mask)
        self.policy_tokens = sum(partial.policy_mask)
        self.logprobs = list(partial.logprobs)
        self.spans = list(partial.spans)
        self.turn = partial.turn
        self.turn_state = partial.turn_state  # type: ignore[assignment]
        self.finish_reason = partial.finish_reason
        self.started_at = partial.started_at
        if partial.environment_state:
            kept = json.loads(partial.environment_state)
            self.environment_state, self.messages = kept["state"], kept["messages"]

    def turn_tokens(self) -> list[int]:
        """Policy tokens of the turn that is being, or was last, generated."""
        stop = len(self.token_ids)
        start = stop
        while start and self.policy_mask[start - 1]:
            start -= 1
        return self.token_ids[start:stop]

    def replies(self) -> list[list[int]]:
        """Policy tokens of each turn."""
        runs = _runs(self.policy_mask, [])
        return [self.token_ids[start:stop] for start, stop, policy in runs if policy]


def _runs(mask: Sequence[bool], cuts: Sequence[int]) -> list[tuple[int, int, bool]]:
    """(start, stop, value) of equal neighbours, also cut at `cuts`."""
    edges = sorted({0, len(mask), *cuts, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1])})
    return [(a, b, mask[a]) for a, b in itertools.pairwise(edges) if a < b]
