"""Memory of the relay that this process fills: alone, or its part of it.

    arena = connection.reserve(layout, writers=4)      one process; the others get `arena.ticket` from it
    joined = connection.join(ticket, layout)           each other one
    joined.wrote(copy_blocks(joined.buffer, layout, tensors, rank))
    arena.seal(version, wrote=copy_blocks(arena.buffer, layout, tensors, 0))     waits for all of them
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from laminar.errors import WeightsError
from laminar.relay.layout import Layout
from laminar.relay.mapping import SharedMapping
from laminar.relay.protocol import Message, VersionInfo
from laminar.relay.reservation import WRITERS_S

SLOWEST_BYTES = 100e6
"""Bytes a second that a busy host still touches and checks; deadlines of reserve and seal grow with it."""


@dataclass(frozen=True)
class Invitation:
    """What another process of this host needs to join: `RelayConnection(socket, run=run).join(ticket, layout)`."""

    socket: str
    run: str
    ticket: str


class Wire(Protocol):
    """The connection that an arena lasts as long as."""

    def call(self, request: Message, timeout: float) -> tuple[Message, int | None]: ...

    def close(self) -> None: ...


class FilledArena:
    """`buffer`: the version's flat buffer, writable. Dying before the end leaves no version."""

    def __init__(self, layout: Layout, mapping: SharedMapping, wire: Wire, timeout: float) -> None:
        self.layout = layout
        self.buffer = mapping.buffer
        self._mapping = mapping
        self._wire = wire
        self._timeout = timeout
        # A child forked during a publish must not keep the arena writable.
        mapping.keep_from_children()

    def drop(self) -> None:
        """No version comes of it; the memory goes when the last view of `buffer` does."""
        self._wire.close()

    def abandon(self) -> None:
        """Give the arena back; no version comes of it. Raises WeightsError if views of `buffer` are still alive."""
        self._wire.close()
        self._unmap()

    def _unmap(self) -> None:
        close_mapping(self._mapping, "the arena")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.abandon()
        else:
            # The error's traceback may keep views alive; the memory goes with them, and the error is what counts.
            self._wire.close()


class WritableArena(FilledArena):
    """A reserved arena: fill `buffer`, then `seal` or `abandon`. `invitation`: what lets other writers join it."""

    def __init__(
        self, layout: Layout, mapping: SharedMapping, wire: Wire, timeout: float, invitation: Invitation
    ) -> None:
        super().__init__(layout, mapping, wire, timeout)
        self.invitation = invitation

    @property
    def ticket(self) -> str:
        return self.invitation.ticket

    def seal(self, version: int, *, wrote: int = 0, replaces: str = "") -> VersionInfo:
        """Close the mapping, so that the bytes are final, and make them `version`. If there are other writers, this one
        `wrote` so many bytes, and the relay waits for them. What is held under this number with the digest
        `replaces` was never published, and gives way.

        Raises WeightsError if views of `buffer` are still alive (nothing is lost: drop them and seal again), if the
        relay holds the version with other bytes, or if another writer died, or all together did not write the whole.
        """
        self._unmap()
        try:
            timeout = self._timeout + WRITERS_S + self.layout.total_bytes / SLOWEST_BYTES
            request = {"command": "seal", "version": version, "bytes": wrote, "replaces": replaces}
            reply, _ = self._wire.call(request, timeout)
            return VersionInfo.from_json(reply["version"])
        finally:
            self._wire.close()


class JoinedArena(FilledArena):
    """An arena that another process has reserved and will seal: copy a part of the bytes, then tell how many."""

    def wrote(self, nbytes: int) -> None:
        """Close the mapping: this part is done. Raises WeightsError if views of `buffer` are still alive."""
        self._unmap()
        try:
            self._wire.call({"command": "wrote", "bytes": nbytes}, self._timeout)
        finally:
            self._wire.close()


def close_mapping(mapping: SharedMapping, what: str) -> None:
    try:
        mapping.close()
    except BufferError as e:
        raise WeightsError(f"{what} is still in use: drop the tensors and views over its buffer first") from e
