"""What the chain needs of a transport: a version's chunks from another relay's arena into our own.

    our relay ── connect: both prove that they know the run's secret ──▶ another relay
    our relay ── find(PullRequest) ─────────────────────────────────▶
    our relay ◀─ VersionHeader, as soon as the other holds or begins to receive what was asked for ──
    our relay ── receive(arena, wanted chunks) ─────────────────────▶
    our relay ◀─ each wanted piece, as soon as the other has it (cut-through) ──

Rules that all transports keep, and that `tests/contract/test_transport.py` checks:

1. No byte of a message is acted upon, and nothing is allocated for it, before the peer has proved the secret.
2. Chunk checksums are *not* the transport's work: the receiver checks each piece against the header's before it
   forwards it, and the header's against the digest that etcd names. A transport may deliver damaged bytes, never
   bytes at another place or after `close`. Where a thread receives them, it may hand chunks to the check at once.
3. A peer that is alive says so at least every `HEARTBEAT_S`, while it waits for data itself too. Silence for the
   transport's stall time, a reset, an error completion: each raises LinkBroken, at once where the wire knows.
4. `Link.close` and the end of `receive` return only when nothing can write into the arena any more.
5. A source's arena is not recycled while it is being sent: `ChunkSource.close` lets go of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece, chunk_count
from laminar.relay.layout import Layout, version_digest

HEARTBEAT_S = 0.25
"""Seconds within which a living peer says something."""
IDLE_S = 30.0
"""Seconds between two requests of an asker, after which its connection may be closed."""


class LinkBroken(WeightsError):
    """The connection to a peer ended, or the peer fell silent."""


class FabricFailed(LinkBroken):
    """This transport does not get through to the peer, which lives: another one may. `transient`: this one may too, if
    it begins anew."""

    def __init__(self, problem: str, *, transient: bool = False) -> None:
        super().__init__(problem)
        self.transient = transient


class PeerRefused(WeightsError):
    """The peer answers, but neither holds nor will receive what was asked for, or denies us."""


@dataclass(frozen=True, order=True)
class VersionName:
    """A version's number and the digest (hex) of its bytes: what a relay asks for is never ambiguous."""

    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.version} ({self.digest[:12]})"


@dataclass(frozen=True)
class VersionHeader:
    """What precedes the chunks. `checksums`: BLAKE3, 32 bytes, of each chunk of `chunk_bytes` (the last is shorter)."""

    name: VersionName
    layout: Layout
    chunk_bytes: int
    checksums: tuple[bytes, ...]

    @property
    def chunks(self) -> int:
        return chunk_count(self.layout.total_bytes, self.chunk_bytes)

    def check(self) -> None:
        """Raises WeightsError unless the checksums are those that the digest stands for."""
        if len(self.checksums) != self.chunks or version_digest(self.layout, self.checksums) != self.name.digest:
            raise WeightsError(
                f"the header of version {self.name} has {len(self.checksums)} checksums for {self.chunks} chunks, or "
                "others than its digest stands for"
            )

    def check_same(self, known: VersionHeader) -> None:
        """Raises PeerRefused unless it says of the same version what `known`, which was checked, does: where the bytes
        lie, and what they are. Chunks of another size would be written over some that were checked and passed on."""
        ours, theirs = ((h.name, h.layout.digest, h.chunk_bytes) for h in (known, self))
        if theirs != ours:
            raise PeerRefused(f"it has {self._places()}; the version that comes already is {known._places()}")
        if self.checksums != known.checksums:
            raise PeerRefused(f"its header of version {self.name} has other checksums than the digest stands for")

    def _places(self) -> str:
        return (
            f"version {self.name} of {self.layout.total_bytes} bytes, layout {self.layout.digest[:12]}, in chunks of "
            f"{self.chunk_bytes} bytes"
        )


@dataclass(frozen=True)
class PullRequest:
    """Any of `acceptable` will do, the newest that the peer holds or receives is best. `held_only`: do not wait for
    one that is still to come. `known_layout`: what the asker has already, so that only its digest is sent. `base`: a
    version that the asker holds, to which pieces may come as differences."""

    acceptable: tuple[VersionName, ...]
    held_only: bool = False
    known_layout: Layout | None = None
    base: VersionName | None = None


class ChunkSource(Protocol):
    """A version of this relay, complete or still arriving, as a transport reads it."""

    @property
    def header(self) -> VersionHeader: ...

    async def allocated(self) -> None:
        """Returns once there is an arena for it. Raises WeightsError if there will be none."""
        ...

    @property
    def arena(self) -> Arena:
        """Where the bytes lie, at chunk index x chunk_bytes; once it is `allocated`. Only those of a piece that `ready`
        gave may be read."""
        ...

    @property
    def base(self) -> Arena | None:
        """Where the version lies that the request named as base, if it is here and has the same layout."""
        ...

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        """The first piece of `wanted` that is here and checked; waits for one. Raises WeightsError if none will be."""
        ...

    def close(self) -> None:
        """Nothing reads the arena for this source any more."""
        ...


Landed = Callable[[int], None]
"""Told the index of a chunk whose bytes lie in the arena, by the thread that received them."""


class Link(Protocol):
    """An authenticated connection to one relay; one request at a time. All methods raise LinkBroken.

    `round_trip_s`: seconds that one exchange of small messages took when it was opened. `received`: bytes that pieces
    took on their way so far; `differences`: pieces among them that came as such. `tells_landed`: whether threads
    receive, so that `receive` calls `landed`."""

    tells_landed: bool
    round_trip_s: float
    received: int
    differences: int

    async def find(self, request: PullRequest) -> VersionHeader:
        """Waits as long as the peer lives and has nothing acceptable yet. Raises PeerRefused. The caller checks the
        header."""
        ...

    def receive(
        self, arena: Arena, wanted: ChunkSet, grain: int, base: Arena | None = None, landed: Landed | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Each piece of the found version once its bytes lie in `arena`, unchecked; ends when all of `wanted` came.
        `base`: where the version lies that the request named so, with the layout of the one that was found; without it
        no differences are taken. `landed`: called for those chunks that a thread received whole, before their piece is
        given; the thread waits for it. Raises DeltaError for what is none to that base, PeerRefused if the peer gives
        the version up. `aclose` it: then nothing more is written."""
        ...

    async def close(self) -> None: ...


FindSource = Callable[[PullRequest], Awaitable[ChunkSource]]
"""Finds what a peer asks for, waiting if need be; raises WeightsError if this relay will not have it."""


class Transport(Protocol):
    """One way to reach relays: plain sockets, or RDMA where both ends have a device."""

    name: str

    async def listen(self, find: FindSource) -> str:
        """Serve peers straight from the arenas that `find` gives; the endpoint that others reach this relay by."""
        ...

    async def connect(self, relay: str, endpoint: str, *, deadline_s: float) -> Link:
        """Reach the relay with the id `relay`, which gave this endpoint; both have proved the secret on return.
        Raises LinkBroken (FabricFailed: try another transport), or PeerRefused if somebody else answers there."""
        ...

    def passed_over(self, relay: str, problem: FabricFailed) -> None:
        """Another transport reached `relay`, which this one had said not to get through to, with `problem`."""
        ...

    async def close(self) -> None:
        """Stop serving; what a peer could still write into is destroyed before this returns."""
        ...
