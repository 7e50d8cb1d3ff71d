"""How two relays prove to each other that they know the run's secret, and seal what they say afterwards. No I/O.

    server ── GREETING: magic, protocol, nonce s ─────────────────▶ asker
    server ◀─ PROOF: magic, protocol, nonce a, HMAC("asker", …) ─── asker
    server ── ACCEPT: HMAC("server", …) ──────────────────────────▶ asker

Each HMAC covers both nonces, the run and the id of the relay that the asker means, so that nothing recorded can be
played again, and a relay that took another's address is noticed. All three are of fixed size: nothing is allocated
for a stranger. Frames carry a tag over direction and number afterwards: a connection cannot be taken over, and frames
cannot be dropped, repeated or changed. Weights themselves are not encrypted; their digest comes from etcd.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from laminar.relay.transport.base import PeerRefused

MAGIC, PROTOCOL = b"LMNR", 1
NONCE_BYTES = 32
TAG_BYTES = 16
GREETING = struct.Struct(f">4sB{NONCE_BYTES}s")
PROOF = struct.Struct(f">4sB{NONCE_BYTES}s32s")
ACCEPT = struct.Struct(">32s")


@dataclass(frozen=True)
class Identity:
    """Who we are and whom we mean: `relay` is the id of the relay that is asked."""

    secret: bytes
    run: str
    relay: str


class Sealer:
    """Tags of the frames of one direction of a connection."""

    def __init__(self, key: bytes, direction: str) -> None:
        self._key = hmac.digest(key, direction.encode("ascii"), hashlib.sha256)
        self._count = 0

    def tag(self, data: bytes) -> bytes:
        """The tag of the next frame of this direction."""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + data, hashlib.sha256)[:TAG_BYTES]

    def check(self, data: bytes, tag: bytes) -> None:
        """Raises PeerRefused unless `tag` is that of `data` as the next frame."""
        if not hmac.compare_digest(self.tag(data), tag):
            raise PeerRefused("a frame's tag is wrong: it was changed on its way, or is not of this connection")


class Asker:
    """The connecting side."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._nonces = b""

    def prove(self, greeting: bytes) -> bytes:
        """The proof to send. Raises PeerRefused if the greeting is not a relay's."""
        theirs = _nonce(GREETING.unpack(greeting))
        ours = secrets.token_bytes(NONCE_BYTES)
        self._nonces = theirs + ours
        return PROOF.pack(MAGIC, PROTOCOL, ours, _mac(self._identity, "asker", self._nonces))

    def finish(self, accept: bytes) -> tuple[Sealer, Sealer]:
        """What seals our frames, and what checks theirs. Raises PeerRefused unless they know the secret."""
        (mac,) = ACCEPT.unpack(accept)
        if not hmac.compare_digest(mac, _mac(self._identity, "server", self._nonces)):
            raise PeerRefused("the peer does not know this run's secret, or is another relay than was meant")
        return _sealers(self._identity, self._nonces, "asker", "server")


class Server:
    """The accepting side."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def greeting(self) -> bytes:
        return GREETING.pack(MAGIC, PROTOCOL, self._nonce)

    def accept(self, proof: bytes) -> tuple[bytes, Sealer, Sealer]:
        """The answer, what seals our frames, and what checks theirs. Raises PeerRefused."""
        magic, protocol, nonce, mac = PROOF.unpack(proof)
        nonces = self._nonce + _nonce((magic, protocol, nonce))
        if not hmac.compare_digest(mac, _mac(self._identity, "asker", nonces)):
            raise PeerRefused("it does not know this run's secret, or means another relay")
        answer = ACCEPT.pack(_mac(self._identity, "server", nonces))
        return answer, *_sealers(self._identity, nonces, "server", "asker")


def _nonce(fields: tuple[bytes, int, bytes]) -> bytes:
    magic, protocol, nonce = fields
    if magic != MAGIC:
        raise PeerRefused(f"it begins with {magic!r}: not a relay of Laminar")
    if protocol != PROTOCOL:
        raise PeerRefused(f"it speaks protocol {protocol}, this is {PROTOCOL}: use one Laminar everywhere")
    return nonce


def _mac(identity: Identity, role: str, nonces: bytes) -> bytes:
    # The fields' lengths are fixed or end with a zero byte, so no two meanings give the same text.
    text = b"\0".join([role.encode(), identity.run.encode(), identity.relay.encode(), nonces])
    return hmac.digest(identity.secret, b"laminar relay\0" + text, hashlib.sha256)


def _sealers(identity: Identity, nonces: bytes, ours: str, theirs: str) -> tuple[Sealer, Sealer]:
    key = _mac(identity, "session", nonces)
    return Sealer(key, ours), Sealer(key, theirs)
