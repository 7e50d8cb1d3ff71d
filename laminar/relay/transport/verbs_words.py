"""What two relays tell each other of queue pairs, in JSON: the ends, the memory that may be written, and failures."""

from __future__ import annotations

import ipaddress

from laminar.relay.protocol import Message, decode, integer, integers, text
from laminar.relay.transport.base import FabricFailed, PeerRefused
from laminar.relay.transport.frames import MAX_REASON, encode_json
from laminar.relay.transport.verbs_device import REGION
from laminar.relay.transport.verbs_queue import QueueEnd, Target

MAX_KEYS = 4096
MAX_ADDRESS = (1 << 64) - 1


def encode_queue(end: QueueEnd, target: Target | None = None) -> bytes:
    message: Message = {
        "number": end.number, "sequence": end.sequence, "gid": end.gid, "lid": end.lid, "mtu": end.mtu,
        "link_layer": end.link_layer,
    }  # fmt: skip
    if target is not None:
        message |= {"address": target.address, "bytes": target.nbytes, "keys": list(target.keys)}
    return encode_json(message)


def decode_queue(payload: bytes, total_bytes: int) -> tuple[QueueEnd, Target]:
    """An asker's end and memory. Raises WeightsError unless it has room for `total_bytes`."""
    message = decode(payload)
    keys = integers(message, "keys", MAX_KEYS, 0, (1 << 32) - 1)
    address = integer(message, "address", 0, MAX_ADDRESS)
    nbytes = integer(message, "bytes", 0, MAX_ADDRESS)
    if nbytes != total_bytes or len(keys) != -(-total_bytes // REGION) or address + nbytes > MAX_ADDRESS:
        raise PeerRefused(f"memory of {nbytes} bytes in {len(keys)} regions for a version of {total_bytes}")
    return decode_queue_end(message), Target(address, nbytes, tuple(keys))


def _address(gid: str) -> str:
    """As eight groups of four digits, which is what the device's library reads."""
    try:
        return ipaddress.IPv6Address(gid).exploded
    except ValueError as e:
        raise PeerRefused(f"{gid[:64]!r} is not the address of a port") from e


def decode_queue_end(message: Message) -> QueueEnd:
    return QueueEnd(
        number=integer(message, "number", 0, (1 << 24) - 1),
        sequence=integer(message, "sequence", 0, (1 << 24) - 1),
        gid=_address(text(message, "gid", 64)),
        lid=integer(message, "lid", 0, (1 << 16) - 1),
        mtu=integer(message, "mtu", 1, 5),
        link_layer=integer(message, "link_layer", 0, 8),
    )


def encode_failure(problem: FabricFailed) -> bytes:
    return encode_json({"reason": str(problem)[:MAX_REASON], "transient": problem.transient})


def decode_failure(peer: str, payload: bytes) -> FabricFailed:
    """What `peer` told of a device: its own, or ours in its words. Raises WeightsError for nonsense."""
    message = decode(payload)
    return FabricFailed(f"{peer}: {text(message, 'reason', MAX_REASON)}", transient=message.get("transient") is True)
