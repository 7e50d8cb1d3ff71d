"""What the chain needs of a transport: a version's chunks from a predecessor's arena into our own.

    our relay ── PullRequest(version, from_chunk) ──▶ predecessor
    our relay ◀── VersionHeader, then (index, bytes) for each chunk from from_chunk on ── predecessor

The receiver reserves an arena for the header's layout, puts each chunk into its place, checks it, tells its own
successor that the chunk is there (cut-through), and seals the arena under the header's digest once all are there. If
the link breaks it asks another predecessor for the first chunk it lacks. A transport authenticates its peer with the
run's secret before the first byte, puts a deadline on each wait, and raises WeightsError naming peer and chunk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from laminar.relay.layout import Layout


@dataclass(frozen=True)
class VersionHeader:
    """What precedes the chunks. `chunk_bytes` is the run's chunk size; the last chunk may be shorter.

    Chunk checksums come with the chunks: the predecessor may itself still be receiving the version.
    """

    version: int
    layout: Layout
    chunk_bytes: int


@dataclass(frozen=True)
class PullRequest:
    """`from_chunk` is the first chunk that the asker lacks (0-based). `version` None: the newest."""

    version: int | None
    from_chunk: int


class ChunkSource(Protocol):
    """A version of this relay, complete or still arriving, as a transport reads it."""

    @property
    def header(self) -> VersionHeader: ...

    async def chunk(self, index: int) -> tuple[memoryview, bytes]:
        """Bytes and checksum of chunk `index`, as soon as they are there. Raises WeightsError if they never come."""
        ...


class Link(Protocol):
    """An authenticated connection to one predecessor."""

    async def pull(self, request: PullRequest) -> VersionHeader:
        """Ask for a version; the header says what will come."""
        ...

    def receive_into(self, target: memoryview) -> AsyncIterator[tuple[int, bytes]]:
        """(index, checksum) of each chunk once its bytes lie in `target` (the whole arena) at index x chunk_bytes."""
        ...

    async def close(self) -> None: ...


FindSource = Callable[[PullRequest], Awaitable[ChunkSource]]
"""Finds what a peer asks for; raises WeightsError if this relay neither holds nor receives it."""


class Transport(Protocol):
    """One way to reach relays: plain sockets, or RDMA where both ends have a device."""

    async def connect(self, endpoint: str, *, deadline: float) -> Link:
        """Reach the relay at `endpoint` within `deadline` seconds."""
        ...

    async def listen(self, host: str, find: FindSource) -> str:
        """Serve peers straight from the arenas that `find` gives; returns the endpoint (a free port is bound)."""
        ...

    async def close(self) -> None:
        """Stop serving; what a peer could still write into is destroyed before this returns."""
        ...
