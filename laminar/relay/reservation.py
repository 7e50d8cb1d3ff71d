"""An arena that was reserved, and its writers: one process, or those of a sharded trainer on this host. No I/O.

    reserve(writers = n) ──▶ ticket ──▶ join × (n - 1) ──▶ each copies its blocks ──▶ wrote × (n - 1) ──┐
                                                                  owner: seal ──── waits for all ───────┴──▶ version

The seal is the barrier: the writers need none among themselves. It succeeds only if every writer said that it was done,
and if together they wrote as many bytes as the version's tensors have. So a writer that died or was forgotten, or one
that wrote too little or too much, leaves no version. Which bytes they wrote is up to them: the blocks of a mesh of
devices (`blocks`) do not overlap.
"""

from __future__ import annotations

import asyncio

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.layout import Layout

MAX_WRITERS = 1024
WRITERS_S = 30.0
"""Seconds that a seal waits for the other writers: they began to copy when its owner did."""


class Reservation:
    """`writers` counts the owner, who seals. `ticket`: what the others join by."""

    def __init__(self, arena: Arena, layout: Layout, writers: int, ticket: str) -> None:
        self.arena = arena
        self.layout = layout
        self.writers = writers
        self.ticket = ticket
        self.joined = 0
        self.done = 0
        self.written = 0
        self.problem = ""
        self._changed = asyncio.Event()

    def validate(self) -> None:
        """Raises AssertionError if the counts disagree."""
        assert 0 <= self.done <= self.joined < self.writers
        assert self.written == 0 or self.done > 0

    def join(self) -> None:
        """One more writer. Raises WeightsError if all are there, or no version will come of it."""
        if self.problem:
            raise WeightsError(f"nothing more is written under this ticket: {self.problem}")
        if self.joined + 1 >= self.writers:
            raise WeightsError(f"all {self.writers} writers of this arena have come; reserve it for more")
        self.joined += 1

    def wrote(self, nbytes: int) -> None:
        """A writer that had joined is done: it has no mapping of the arena any more."""
        self.done += 1
        self.written += nbytes
        self._changed.set()

    def lose(self, problem: str) -> None:
        """No version will come of it: a writer is gone before it was done, or the owner gave it up."""
        self.problem = self.problem or problem
        self._changed.set()

    async def complete(self, own_bytes: int) -> None:
        """Returns once all other writers are done; the owner has written `own_bytes`. Raises WeightsError if they will
        not be, or not in time, or if they wrote other bytes than the version has. One writer alone needs no count."""
        if self.writers == 1:
            return
        try:
            async with asyncio.timeout(WRITERS_S):
                while not self.problem and self.done < self.writers - 1:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.lose(
                f"{self.writers - 1 - self.done} of its {self.writers} writers were not done {WRITERS_S:g} s after the "
                f"one that seals it; {self.joined + 1} have come at all"
            )
        expected, found = sum(spec.nbytes for spec in self.layout.tensors), self.written + own_bytes
        if found != expected:
            self.lose(f"its {self.writers} writers wrote {found} bytes, its tensors have {expected}")
        if self.problem:
            raise WeightsError(f"a version cannot be sealed: {self.problem}; publish it again")
