"""The words between a relay and the processes of its host: length-prefixed JSON over a Unix socket, and descriptors.

A frame is a 4-byte big-endian length and that many bytes of JSON, an object. A descriptor travels (SCM_RIGHTS) with
the first byte of the frame that announces it. Each request gets one reply: {"ok": true, …} or {"ok": false,
"error": text}. A connection opens with hello; a frame that breaks these rules is answered with an error and closed.

    command   request                    reply
    hello     protocol, run              protocol, run, boot, chunk_bytes
    status                               versions, newest, arenas, retained, errors, refusals
    reserve   layout, writers            reserved: true, ticket + writable fd | false, reason
    join      ticket                     layout_digest + writable fd  (of an arena reserved for several writers)
    wrote     bytes                      -   (by one that joined; its mapping is closed)
    seal      version, bytes, replaces   version   (the arena reserved on this connection; its mapping is closed)
    open      version or null: newest    version, layout, chunk_bytes + read-only fd
    wait      newer_than, timeout        version or null
    retain    versions                   -
    fetch     version, digest, timeout   -   (once it is here; from another relay if need be)

A reservation and a hold last as long as their connection: a process that dies lets go of both.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from laminar.errors import ConfigError, WeightsError

PROTOCOL = 1
HEADER = struct.Struct(">I")
MAX_FRAME = 32 << 20
"""Holds the layout of `MAX_TENSORS` tensors with names of usual length."""
MAX_HELLO = 4096
MAX_WAIT = 20.0
"""Seconds that one `wait` request may last; clients ask again."""
MAX_FETCH = 600.0
"""Seconds that one `fetch` may take."""
MAX_VERSION = 1 << 53
MAX_RETAINED = 10_000
MAX_SOCKET_PATH = 107
"""What sun_path holds on Linux."""

Message = dict[str, Any]


class ProtocolError(WeightsError):
    """A frame or message does not follow the protocol."""


class RelayUnavailable(WeightsError):
    """No relay answers on the socket, or it went away during a call: try again, it may be restarting."""


@dataclass(frozen=True)
class VersionInfo:
    """A sealed version; `bytes` is its layout's total."""

    version: int
    digest: str
    layout_digest: str
    bytes: int

    def to_json(self) -> Message:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> VersionInfo:
        if not isinstance(data, dict):
            raise ProtocolError("a version is not an object")
        return cls(
            version=integer(data, "version", 0, MAX_VERSION),
            digest=text(data, "digest", 128),
            layout_digest=text(data, "layout_digest", 128),
            bytes=integer(data, "bytes", 1, MAX_VERSION),
        )


def encode(message: Message) -> bytes:
    payload = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("utf-8")
    if len(payload) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME}")
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes, limit: int = MAX_FRAME) -> int:
    length = int(HEADER.unpack(header)[0])
    if not 0 < length <= limit:
        raise ProtocolError(f"a frame of {length} bytes: 1 to {limit} are allowed")
    return length


def decode(payload: bytes) -> Message:
    try:
        message = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"a frame of {len(payload)} bytes is not JSON: {str(e)[:100]}") from e
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__}, not an object")
    return message


def checked_reply(message: Message) -> Message:
    """The reply of a request that went well. Raises WeightsError with the relay's words otherwise."""
    if message.get("ok") is True:
        return message
    raise WeightsError(f"the relay refused: {text(message, 'error', 10_000)}")


def integer(message: Message, key: str, low: int, high: int) -> int:
    value = message.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{key} = {str(value)[:40]!r} is not a whole number from {low} to {high}")
    return value


def text(message: Message, key: str, longest: int) -> str:
    value = message.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise ProtocolError(f"{key} is not a string of at most {longest} characters")
    return value


def number(message: Message, key: str, low: float, high: float) -> float:
    value = message.get(key)
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise ProtocolError(f"{key} = {str(value)[:40]!r} is not a number from {low} to {high}")
    return float(value)  # type: ignore[arg-type]


def integers(message: Message, key: str, longest: int, low: int, high: int) -> list[int]:
    value = message.get(key)
    if not isinstance(value, list) or len(value) > longest:
        raise ProtocolError(f"{key} is not a list of at most {longest} numbers")
    if any(type(item) is not int or not low <= item <= high for item in value):
        raise ProtocolError(f"{key} holds something other than whole numbers from {low} to {high}")
    return value


def peer_user(sock: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, as the kernel knows it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def checked_socket_path(path: str | Path) -> Path:
    """Raises ConfigError where the kernel could not bind or reach a socket of this name."""
    path = Path(path)
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the relay's socket path has {length} bytes, the kernel allows {MAX_SOCKET_PATH}: {path}; "
            "use a shorter folder, such as one under /tmp or $XDG_RUNTIME_DIR"
        )
    return path


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
