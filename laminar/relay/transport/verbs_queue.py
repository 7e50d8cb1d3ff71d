"""Queue pairs: one for each transfer, all on one completion queue of the device, driven by the event loop.

    sender    write ──▶ slices, the last with the piece's first chunk as immediate data ──▶ completion: a free slot
    receiver  receive posted ──▶ credit to the sender ──▶ its write uses the receive up ──▶ completion: arrived

A sender writes a piece only for a credit, so a receive is always posted and the device never has to ask it to wait.
What is outstanding is counted here: a queue that is full refuses with an error that tells nothing. After an error a
queue pair is useless; the next transfer makes a new one on the same protection domain, memory and completion queue.
pyverbs never lets go of the interpreter's lock: nothing here may block, so completions are polled when the device's
descriptor is readable.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.relay.transport.base import FabricFailed, LinkBroken
from laminar.relay.transport.verbs_device import INFINIBAND, REGION, Device, Region

SENDS, RECEIVES = 32, 32
"""Work requests that one queue pair may have outstanding; RECEIVES is also the credits that a sender begins with."""
SLICE = 4 << 20
"""Most bytes of one write: a larger one could not be taken back half-way."""
COMPLETIONS = 8192
POLLED = 32
TIMEOUT, RETRIES = 16, 6
"""A write that is not acknowledged within 4.1 us x 2^TIMEOUT, 0.27 s, is sent again, so often: 1.9 s in all, as long as
a peer may be silent otherwise. On a loaded machine a device is late by some 0.1 s without having lost anything, and
soft-RoCE takes some of what is sent a second time for invalid. More than 6 retries mean for ever there."""
RNR_TIMER, RNR_RETRIES = 12, 3
"""Code of the wait (0.64 ms) when no receive is posted, and how often it is waited."""
PROGRESS_S = 30.0
"""Seconds without a credit or a completion from a living peer after which a transfer is given up."""

LASTING = ("RETRY_EXC_ERR", "REM_ACCESS_ERR", "LOC_PROT_ERR", "LOC_LEN_ERR")
"""Errors that a new queue pair would meet again: RETRIES were made, or memory is not what the other takes it for."""
MEANINGS = {
    "RETRY_EXC_ERR": "the peer's device does not acknowledge: it, its host or the network between is gone",
    "RNR_RETRY_EXC_ERR": "the peer had no receive posted",
    "REM_ACCESS_ERR": "the peer's device refuses the write: its memory is not registered any more, or not for us",
    "REM_INV_REQ_ERR": "the peer's device finds the request invalid",
    "REM_OP_ERR": "the peer's device could not carry out the write",
    "LOC_PROT_ERR": "our own memory is not registered",
    "LOC_LEN_ERR": "the message is longer than the port allows",
    "WR_FLUSH_ERR": "the queue pair had broken before",
}


@dataclass(frozen=True)
class QueueEnd:
    """What the other end of a queue pair must know. `gid`: the address; `lid`: 0 outside InfiniBand."""

    number: int
    sequence: int
    gid: str
    lid: int
    mtu: int
    link_layer: int


@dataclass(frozen=True)
class Target:
    """A peer's arena: `keys` of its regions of REGION bytes, from `address` on."""

    address: int
    nbytes: int
    keys: tuple[int, ...]


class Completions:
    """The completion queue of a device, and which queue pair each completion is for."""

    def __init__(self, device: Device) -> None:
        queues = importlib.import_module("pyverbs.cq")
        self.device = device
        self._loop = asyncio.get_running_loop()
        before = _event_descriptors()
        self._channel: Any = queues.CompChannel(device.context)
        # Old releases do not tell the channel's descriptor: it is the one that has just appeared.
        self._fd = int(getattr(self._channel, "fd", 0) or (_event_descriptors() - before).pop())
        os.set_blocking(self._fd, False)
        size = min(COMPLETIONS, int(device.context.query_device().max_cqe))
        self.queue: Any = queues.CQ(device.context, size, None, self._channel)
        self.queue.req_notify()
        self._room = size // (SENDS + RECEIVES)
        self._pairs: dict[int, QueuePair] = {}
        self._serial = 0
        self._loop.add_reader(self._fd, self._completed)

    def add(self, pair: QueuePair) -> int:
        """The pair's serial number, by which its completions are known: numbers of queue pairs are used again."""
        if len(self._pairs) >= self._room:
            raise FabricFailed(
                f"{len(self._pairs)} transfers use {self.device.port} already, which is all it has room for"
            )
        self._serial += 1
        self._pairs[self._serial] = pair
        return self._serial

    def remove(self, serial: int) -> None:
        self._pairs.pop(serial, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        for pair in list(self._pairs.values()):
            pair.close()
        self.queue.close()
        self._channel.close()

    def _completed(self) -> None:
        try:
            self._channel.get_cq_event(self.queue)
            self.queue.ack_events(1)
            # Armed before it is emptied: what completes in between rings again.
            self.queue.req_notify()
            while (found := self.queue.poll(POLLED))[0]:
                for completion in found[1]:
                    pair = self._pairs.get(completion.wr_id >> 1)
                    if pair is not None:
                        pair.completed(completion)
        except self.device.errors as e:
            for pair in list(self._pairs.values()):
                pair.fail(FabricFailed(f"the completion queue of {self.device.port} failed: {e}"))


class QueuePair:
    """One end. `writable`: the peer may write into this device's registered memory. `close` it: from then on nothing
    reads or writes memory for it."""

    def __init__(self, completions: Completions, peer: str, *, writable: bool) -> None:
        self.peer = peer
        self.arrived: deque[int] = deque()
        """Immediate data of writes that came, in their order."""
        self.credits = 0
        self._completions = completions
        self._device = device = completions.device
        self._constants = device.constants
        self._access = 0 if not writable else self._constants.IBV_ACCESS_REMOTE_WRITE
        self._access |= self._constants.IBV_ACCESS_LOCAL_WRITE
        self._sends = 0
        self._problem: LinkBroken | None = None
        self._changed = asyncio.Event()
        self._requests: Any = importlib.import_module("pyverbs.wr")
        self._sequence = secrets.randbelow(1 << 24)
        self._serial = completions.add(self)
        try:
            self._pair: Any = self._create()
        except device.errors as e:
            completions.remove(self._serial)
            raise FabricFailed(f"{device.port} makes no queue pair: {e}") from e

    def _create(self) -> Any:
        pairs = importlib.import_module("pyverbs.qp")
        queue = self._completions.queue
        room = pairs.QPCap(max_send_wr=SENDS, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        settings = pairs.QPInitAttr(qp_type=self._constants.IBV_QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=0)
        start = pairs.QPAttr(port_num=self._device.port.number)
        start.qp_access_flags = self._access
        return pairs.QP(self._device.domain, settings, start)

    @property
    def end(self) -> QueueEnd:
        port = self._device.port
        return QueueEnd(
            int(self._pair.qp_num), self._sequence, self._device.gid.text, port.lid, port.mtu, port.link_layer
        )

    def connect(self, other: QueueEnd) -> None:
        """To the peer's end. Raises FabricFailed if there is no way to it."""
        port = self._device.port
        if other.link_layer != port.link_layer:
            raise FabricFailed(f"{self.peer} is on another kind of network than {port}")
        pairs, addresses = importlib.import_module("pyverbs.qp"), importlib.import_module("pyverbs.addr")
        way = addresses.GlobalRoute(dgid=addresses.GID(other.gid), sgid_index=self._device.gid.index)
        way.hop_limit = 64
        settings = pairs.QPAttr(port_num=port.number)
        settings.ah_attr = addresses.AHAttr(
            port_num=port.number, is_global=1, gr=way, dlid=other.lid if port.link_layer == INFINIBAND else 0
        )
        settings.qp_access_flags = self._access
        settings.path_mtu = min(port.mtu, other.mtu)
        settings.dest_qp_num, settings.rq_psn, settings.sq_psn = other.number, other.sequence, self._sequence
        settings.max_rd_atomic = settings.max_dest_rd_atomic = 1
        settings.timeout, settings.retry_cnt = TIMEOUT, RETRIES
        settings.min_rnr_timer, settings.rnr_retry = RNR_TIMER, RNR_RETRIES
        try:
            self._pair.to_rts(settings)
        except self._device.errors as e:
            raise FabricFailed(f"{port} finds no way to {self.peer} ({other.gid}): {e}") from e

    # -- receiving ----------------------------------------------------------------------------------------------

    def post_receives(self, count: int) -> None:
        """Room for `count` more pieces. At most RECEIVES may be posted and not have come."""
        scratch = self._device.scratch
        element = self._requests.SGE(scratch.buf, scratch.length, scratch.lkey)
        request = self._requests.RecvWR(wr_id=self._serial << 1 | 1, num_sge=1, sg=[element])
        try:
            for _ in range(count):
                self._pair.post_recv(request)
        except self._device.errors as e:
            raise FabricFailed(f"{self._device.port} takes no receive: {e}", transient=True) from e

    async def arrival(self) -> int:
        """Immediate data of the next write that came."""
        await self._until(lambda: bool(self.arrived), None)
        return self.arrived.popleft()

    # -- sending ------------------------------------------------------------------------------------------------

    def grant(self, count: int) -> None:
        """The peer has room for `count` more pieces."""
        self.credits += count
        self._changed.set()

    async def write(
        self, regions: Sequence[Region], address: int, target: Target, start: int, end: int, immediate: int
    ) -> None:
        """Bytes `start` to `end` of our arena, which lies at `address`, to the same place in the peer's. Returns once
        the device has them to do; `drained` tells when they are there."""
        await self._until(lambda: self.credits > 0, "gave no credit")
        self.credits -= 1
        while start < end:
            # A write lies within one region of both ends.
            stop = min(end, start + self.slice_bytes, (start // REGION + 1) * REGION)
            await self._until(lambda: self._sends < SENDS, "acknowledged nothing")
            place = start // REGION
            self._post(
                self._requests.SGE(address + start, stop - start, regions[place].local_key),
                target.keys[place],
                target.address + start,
                immediate if stop == end else None,
            )
            start = stop

    async def drained(self) -> None:
        """All that was written lies in the peer's memory."""
        await self._until(lambda: self._sends == 0, "acknowledged nothing")
        if self._problem is not None:
            raise self._problem  # what failed is not outstanding any more either

    @property
    def slice_bytes(self) -> int:
        return min(SLICE, self._device.port.max_message)

    def _post(self, element: Any, key: int, address: int, immediate: int | None) -> None:
        constants = self._constants
        plain = immediate is None
        request = self._requests.SendWR(
            wr_id=self._serial << 1,
            opcode=constants.IBV_WR_RDMA_WRITE if plain else constants.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            sg=[element],
            imm_data=immediate or 0,
            send_flags=constants.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(key, address)
        try:
            self._pair.post_send(request)
        except self._device.errors as e:
            problem = f"{self._device.port} takes no write with {self._sends} outstanding: {e}"
            raise FabricFailed(problem, transient=True) from e
        self._sends += 1

    # -- completions --------------------------------------------------------------------------------------------

    def completed(self, completion: Any) -> None:
        if not completion.wr_id & 1:
            self._sends -= 1
        if completion.status != self._constants.IBV_WC_SUCCESS:
            name = error_name(self._constants, completion)
            problem = f"{self.peer} by {self._device.port}: {explained(name, completion)}"
            self.fail(FabricFailed(problem, transient=name not in LASTING))
        elif completion.wr_id & 1:
            self.arrived.append(int(completion.imm_data))
        self._changed.set()

    def fail(self, problem: LinkBroken) -> None:
        """Everybody who waits is told; the first problem counts, since the others follow from it."""
        self._problem = self._problem or problem
        self._changed.set()

    def close(self) -> None:
        if self._serial:
            self._completions.remove(self._serial)
            self._serial = 0
            self._pair.close()
            self.fail(LinkBroken(f"the queue pair to {self.peer} is closed"))

    async def _until(self, condition: Callable[[], bool], complaint: str | None) -> None:
        try:
            async with asyncio.timeout(PROGRESS_S if complaint else None):
                while not condition():
                    if self._problem is not None:
                        raise self._problem
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise LinkBroken(f"{self.peer} {complaint} for {PROGRESS_S:.0f} s") from None


def error_name(constants: Any, completion: Any) -> str:
    """Of an error completion, without what all have in common."""
    names = [name for name in dir(constants) if name.startswith("IBV_WC_") and name.endswith("_ERR")]
    status = int(completion.status)
    return next((n.removeprefix("IBV_WC_") for n in names if int(getattr(constants, n)) == status), f"status {status}")


def explained(name: str, completion: Any) -> str:
    """An error completion in words."""
    return f"{MEANINGS.get(name, 'the device reports an error')} ({name}, vendor's code {completion.vendor_err})"


def _event_descriptors() -> set[int]:
    """This process's descriptors of RDMA events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in os.readlink(entry):
                found.add(int(entry.name))
        except OSError:
            continue  # the folder's own descriptor, gone by now
    return found
