"""`Coordination` on a real etcd, over grpc.aio and the stubs of etcd3."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.unknown_fields import UnknownFieldSet

from laminar.buffer import requests
from laminar.buffer.coordination import (
    Change,
    Compare,
    Delete,
    Field,
    Get,
    KeyValue,
    Listing,
    Operation,
    Put,
    Snapshot,
    Transaction,
    TransactionResult,
    WatchEvent,
)
from laminar.buffer.etcd3_shim import rpc
from laminar.buffer.etcd_connection import Compacted, EtcdConnection, Tls, says_token_refused
from laminar.errors import CoordinationError, CoordinationUnavailable, LeaseLost

__all__ = ["EtcdCoordination", "Tls"]

log = logging.getLogger(__name__)
T = TypeVar("T")

MAINTENANCE_TIMEOUT_S = 120.0
"""Compaction and defragmentation rewrite the database: seconds for each GiB."""


IN_USE_FIELD = 9
"""`dbSizeInUse` of a StatusResponse."""


class EtcdCoordination:
    """One client of an etcd cluster.

    `endpoints` are HOST:PORT; names are resolved and all members used. `timeout_s` bounds each request, `retry_s` a
    call that is repeated while etcd is unavailable (reads, puts, deletes, grants, revokes; never a transaction).
    """

    def __init__(
        self,
        endpoints: list[str],
        *,
        timeout_s: float = 2.0,
        retry_s: float = 15.0,
        tls: Tls | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        self._connection = EtcdConnection(endpoints, timeout_s=timeout_s, tls=tls, user=user, password=password)
        self._retry_s = retry_s
        self._random = random.Random()

    async def get(self, key: str) -> KeyValue | None:
        requests.check_key(key)
        request = rpc.RangeRequest(key=key.encode())
        reply = await self._retried(lambda: self._range_reply(request, f"get of {key}"), f"get of {key}")
        return key_value(reply.kvs[0]) if reply.kvs else None

    async def range(self, prefix: str, *, page: int = 1000) -> Snapshot:
        """All keys under `prefix` at one revision, read `page` keys at a time."""
        what = f"range of {prefix}"
        return await self._retried(lambda: self._range_once(prefix, page, what), what)

    async def put(self, key: str, value: str, *, lease: int = 0) -> int:
        """Raises LeaseLost if the lease is gone."""
        requests.check_put(key, value)
        what = f"put of {key}"
        request = rpc.PutRequest(key=key.encode(), value=value.encode(), lease=lease)
        reply = await self._retried(lambda: self._connection.call(lambda link: link.kv.Put, request, what), what)
        return int(reply.header.revision)

    async def delete(self, key: str) -> bool:
        """Whether the key was there; after a lost reply False can also mean that the first attempt deleted it."""
        requests.check_key(key)
        what = f"delete of {key}"
        request = rpc.DeleteRangeRequest(key=key.encode())
        reply = await self._retried(
            lambda: self._connection.call(lambda link: link.kv.DeleteRange, request, what), what
        )
        return bool(reply.deleted)

    async def transact(self, transaction: Transaction) -> TransactionResult:
        requests.check_transaction(transaction)
        request = rpc.TxnRequest(
            compare=[compare_message(c) for c in transaction.compare],
            success=[operation_message(o) for o in transaction.success],
            failure=[operation_message(o) for o in transaction.failure],
        )
        first = (*transaction.compare, *transaction.success, *transaction.failure)[0].key
        reply = await self._connection.call(lambda link: link.kv.Txn, request, f"transaction on {first}")
        gets = tuple(
            key_value(r.response_range.kvs[0]) if r.response_range.kvs else None
            for r in reply.responses
            if r.WhichOneof("response") == "response_range"
        )
        return TransactionResult(bool(reply.succeeded), int(reply.header.revision), gets)

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """Raises CoordinationError if etcd refuses the watch, or once this client is closed."""
        seen: int | None = None
        backoff = requests.Backoff(self._random)
        while True:
            try:
                if seen is None:
                    snapshot = await self.range(prefix)
                    seen = snapshot.revision
                    yield Listing(snapshot)
                async with aclosing(self._batches(prefix, seen)) as batches:
                    async for batch in batches:
                        backoff.reset()
                        # Before the yields: a batch holds whole revisions, and is handed out as a whole.
                        seen = batch[-1].revision
                        for change in batch:
                            yield change
            except Compacted as error:
                log.info("watch of %s: changes after %s were compacted, listing again (%s)", prefix, seen, error)
                seen = None
            except CoordinationUnavailable as error:
                log.debug("watch of %s: interrupted after revision %s, resuming (%s)", prefix, seen, error)
            await asyncio.sleep(backoff.next())

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        what = f"grant of a lease of {ttl_s:g} s"
        reply = await self._retried(
            lambda: self._connection.call(lambda link: link.lease.LeaseGrant, request, what), what
        )
        return int(reply.ID), float(reply.TTL)

    async def keep_alive(self, lease: int) -> float:
        """One attempt; the caller repeats it and keeps the deadline."""
        what = f"keep-alive of lease {lease:x}"
        connection = self._connection
        link = await connection.link()
        call = link.lease.LeaseKeepAlive(timeout=connection.timeout_s, metadata=connection.metadata())
        try:
            await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
            reply = await call.read()
        except grpc.aio.AioRpcError as error:
            raise connection.failed(link, error, what) from error
        except asyncio.InvalidStateError as error:  # written to a stream that has ended already
            raise CoordinationUnavailable(f"{what}: the stream to {connection.name} has ended") from error
        except asyncio.CancelledError:
            connection.check_open(what)
            raise
        finally:
            call.cancel()
        if reply is grpc.aio.EOF:
            raise CoordinationUnavailable(f"{what}: {connection.name} ended the stream without an answer")
        connection.answered()
        return float(reply.TTL)

    async def revoke(self, lease: int) -> None:
        """A lease that is gone already is revoked."""
        what = f"revoke of lease {lease:x}"
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._retried(lambda: self._connection.call(lambda link: link.lease.LeaseRevoke, request, what), what)
        except LeaseLost:
            log.debug("%s: it was gone already", what)

    async def close(self) -> None:
        await self._connection.close()

    async def status(self) -> dict[str, str | int]:
        """Of the member that answers: version, revision, member and leader ids; db_size is its file's size in bytes,
        in_use how much of that a defragmentation would leave."""
        what = "status"
        reply = await self._retried(
            lambda: self._connection.call(lambda link: link.maintenance.Status, rpc.StatusRequest(), what), what
        )
        return {
            "version": str(reply.version),
            "db_size": int(reply.dbSize),
            "in_use": unknown_field(reply, IN_USE_FIELD, int(reply.dbSize)),
            "revision": int(reply.header.revision),
            "member": int(reply.header.member_id),
            "leader": int(reply.leader),
        }

    async def compact(self, revision: int) -> None:
        """Forget what was superseded before `revision`. Raises CoordinationError for one that is still to come."""
        what = f"compaction at revision {revision}"
        request = rpc.CompactionRequest(revision=revision, physical=True)
        try:
            await self._connection.call(
                lambda link: link.kv.Compact, request, what, timeout_s=MAINTENANCE_TIMEOUT_S
            )
        except Compacted:
            log.debug("%s: was done before", what)

    async def defragment(self) -> None:
        """Give freed space back on every member, one after the other, then lift their alarms about a full database."""
        for link in await self._connection.each_member():
            try:
                await link.maintenance.Defragment(
                    rpc.DefragmentRequest(), timeout=MAINTENANCE_TIMEOUT_S, metadata=self._connection.metadata()
                )
            except grpc.aio.AioRpcError as error:
                raise self._connection.failed(link, error, "defragmentation") from error
            finally:
                await link.channel.close(None)
        for member in await self.full_members():
            disarm = rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, memberID=member, alarm=rpc.NOSPACE)
            await self._connection.call(lambda link: link.maintenance.Alarm, disarm, "disarming an alarm")

    async def full_members(self) -> list[int]:
        """Ids of the members whose space quota is exhausted: while there is one, the cluster takes no writes."""
        request = rpc.AlarmRequest(action=rpc.AlarmRequest.GET, alarm=rpc.NOSPACE)
        what = "list of alarms"
        reply = await self._retried(
            lambda: self._connection.call(lambda link: link.maintenance.Alarm, request, what), what
        )
        return [int(alarm.memberID) for alarm in reply.alarms if alarm.alarm == rpc.NOSPACE]

    async def _retried(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        return await requests.retry(call, what, self._retry_s, self._random)

    async def _range_reply(self, request: Any, what: str) -> Any:
        return await self._connection.call(lambda link: link.kv.Range, request, what)

    async def _range_once(self, prefix: str, page: int, what: str) -> Snapshot:
        start, end = prefix_range(prefix)
        items: list[KeyValue] = []
        revision = 0
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=page, revision=revision)
            reply = await self._range_reply(request, what)
            revision = revision or int(reply.header.revision)
            items.extend(key_value(kv) for kv in reply.kvs)
            if not reply.more:
                return Snapshot(tuple(items), revision)
            start = reply.kvs[-1].key + b"\0"

    async def _batches(self, prefix: str, seen: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """One watch stream: the changes after revision `seen`, whole revisions at a time."""
        what = f"watch of {prefix}"
        connection = self._connection
        start, end = prefix_range(prefix)
        # From `seen` and not from the next revision: older etcd loses a deletion at exactly the revision of a
        # compaction without saying so, but reports it when asked for an earlier one.
        create = rpc.WatchCreateRequest(key=start, range_end=end, start_revision=seen)
        link = await connection.link()
        # hasleader: the member ends the stream when it loses its leader, instead of falling silent.
        call = link.watch.Watch(metadata=(*connection.metadata(), ("hasleader", "true")))
        try:
            async with asyncio.timeout(connection.timeout_s):
                await call.write(rpc.WatchRequest(create_request=create))
                await self._check_created(await call.read(), seen, what)
            while True:
                response = await call.read()
                self._check_open(response, what)
                batch = tuple(c for e in response.events if (c := change_of(e)).revision > seen)
                if batch:
                    yield batch
        except grpc.aio.AioRpcError as error:
            raise connection.failed(link, error, what) from error
        except (TimeoutError, asyncio.InvalidStateError) as error:
            raise CoordinationUnavailable(
                f"{what}: no stream from {connection.name} in {connection.timeout_s:g} s"
            ) from error
        except asyncio.CancelledError:
            connection.check_open(what)
            raise
        finally:
            call.cancel()

    async def _check_created(self, response: Any, seen: int, what: str) -> None:
        self._check_open(response, what)
        if int(response.header.revision) >= seen:
            return
        # A follower that lags, or an etcd that was set up anew: it would wait for revisions of the old one.
        current = (await self._range_reply(rpc.RangeRequest(key=b"\0", count_only=True), what)).header.revision
        if current < seen:
            raise Compacted(f"{what}: etcd is at revision {current}, before {seen}: its data are not the same any more")

    def _check_open(self, response: Any, what: str) -> None:
        if response is grpc.aio.EOF:
            raise CoordinationUnavailable(f"{what}: {self._connection.name} ended the stream")
        if response.canceled and response.compact_revision:
            raise Compacted(f"{what}: compacted up to revision {response.compact_revision}")
        if response.canceled and self._token_refused(response.cancel_reason):
            raise CoordinationUnavailable(f"{what}: {self._connection.name} refused the token; logging in again")
        if response.canceled:
            reason = response.cancel_reason or "no reason given"
            raise CoordinationError(f"{what}: refused by {self._connection.name}: {reason}")

    def _token_refused(self, reason: str) -> bool:
        doubtful = "permission denied" in reason
        return (doubtful or says_token_refused(reason)) and self._connection.renew_token(doubtful=doubtful)


def unknown_field(message: Any, number: int, default: int) -> int:
    """A number that the server sends and the messages of etcd3, being older, do not name."""
    return next((int(f.data) for f in UnknownFieldSet(message) if f.field_number == number), default)


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """First key and end (exclusive) of all keys that begin with `prefix`."""
    start = prefix.encode()
    if not start:
        return b"\0", b"\0"
    # The last byte of UTF-8 is never 0xff, so it can be incremented.
    return start, start[:-1] + bytes([start[-1] + 1])


def key_value(kv: Any) -> KeyValue:
    return KeyValue(
        kv.key.decode(), kv.value.decode(), int(kv.create_revision), int(kv.mod_revision), int(kv.lease)
    )


def change_of(event: Any) -> Change:
    deleted = event.type == event.DELETE
    return Change(event.kv.key.decode(), None if deleted else key_value(event.kv), int(event.kv.mod_revision))


def compare_message(compare: Compare) -> Any:
    key = compare.key.encode()
    if compare.field is Field.VALUE:
        return rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.VALUE, key=key, value=str(compare.target).encode()
        )
    target = rpc.Compare.CREATE if compare.field is Field.CREATE else rpc.Compare.MOD
    return rpc.Compare(result=rpc.Compare.EQUAL, target=target, key=key, **{compare.field.value: int(compare.target)})


def operation_message(operation: Operation) -> Any:
    key = operation.key.encode()
    match operation:
        case Put(value=value, lease=lease):
            return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value.encode(), lease=lease))
        case Delete():
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
        case Get():
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))
