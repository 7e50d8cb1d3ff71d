"""One relay of a chain as a process, without etcd: told by lines of JSON what etcd would say, it tells what it holds.

    in   {"view": {"epoch": 1, "order": […], "endpoints": {name: HOST:PORT}, "master": name}}
         {"publish_file": {"version": 1, "path": …}} the bytes of a file
         {"publish": {"version": 2, "bytes": n}}     random bytes by the version, as a trainer on this host would; with
                                                     "like": 1, those of version 1 but for one in 64 KiB
         {"announce": [version, digest]}
    out  {"endpoint": HOST:PORT}   {"published": [version, digest]}   {"quarter": version}, once a quarter has come
         {"nearly": version}, once two pieces or less are missing   {"held": version, "digest": …, "at": s, "hop": {…}}

`at` is CLOCK_MONOTONIC, one clock for all processes of a machine. Used by `relay.py` and by tests that kill relays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.follower import ChainView, Follower, Peer
from laminar.relay.holdings import Holdings
from laminar.relay.hops import Tuning
from laminar.relay.layout import Layout
from laminar.relay.receiving import Arriving, Source
from laminar.relay.transport.base import ChunkSource, PullRequest, Transport, VersionName
from laminar.relay.transport.tcp import TcpTransport
from laminar.relay.transport.verbs import VerbsTransport
from laminar.relay.transport.verbs_device import active_ports, select


def unchecked(self: Arriving, index: int) -> bool:
    """In place of `Arriving.is_sound`."""
    return True


class Slow:
    """A source that gives one piece each `seconds`, so that a test meets a broadcast half-way."""

    def __init__(self, source: Source, seconds: float) -> None:
        self.source, self.seconds = source, seconds
        self.header, self.base, self.allocated, self.close = source.header, source.base, source.allocated, source.close

    @property
    def arena(self) -> Arena:
        return self.source.arena

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        await asyncio.sleep(self.seconds)
        return await self.source.ready(wanted, grain)


class Node:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.name = arguments.name
        if arguments.unchecked:
            Arriving.is_sound = unchecked  # type: ignore[method-assign]
        self.holdings = Holdings(chunk_bytes=arguments.chunk_kib << 10, retain=arguments.retain, threads=1)
        self.transport = open_transport(arguments)
        grain = max(1, arguments.piece_kib // arguments.chunk_kib) if arguments.piece_kib else 0
        tuning = Tuning(streams=arguments.streams, grain=grain, rate=arguments.rate, deltas=not arguments.whole)
        self.follower = Follower(self.holdings, {self.transport.name: self.transport}, self.name, "here", tuning=tuning)
        self.slow_s = arguments.slow_ms / 1e3
        self.silent = arguments.silent

    async def find(self, request: PullRequest) -> ChunkSource:
        source = await self.holdings.find(request)
        return Slow(source, self.slow_s) if self.slow_s else source

    async def run(self) -> None:
        await self.holdings.start()
        tell(endpoint=await self.transport.listen(self.find))
        works = [self.follower.run(), self.report(), *([] if self.silent else [self.report_progress()])]
        tasks = [asyncio.create_task(work) for work in works]
        reader = asyncio.StreamReader(limit=1 << 24)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            for command, value in json.loads(line).items():
                await getattr(self, command)(value)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.transport.close()
        await self.holdings.stop()

    async def view(self, value: dict[str, Any]) -> None:
        peers = {name: Peer("here", {self.transport.name: endpoint}) for name, endpoint in value["endpoints"].items()}
        self.follower.see(ChainView(value["epoch"], tuple(value["order"]), peers, value["master"]))

    async def publish_file(self, value: dict[str, Any]) -> None:
        data = Path(value["path"]).read_bytes()
        layout, arena = await self._reserve(len(data))
        with arena.buffer(layout.total_bytes) as buffer:
            buffer[: len(data)] = data
        await self._seal(arena, layout, value["version"])

    async def publish(self, value: dict[str, int]) -> None:
        layout, arena = await self._reserve(value["bytes"])
        with arena.buffer(layout.total_bytes) as buffer:
            # One random block, written at shifting places: cheap, and no two chunks are alike.
            version, like = value["version"], value.get("like", value["version"])
            block = random.Random(like).randbytes(1 << 16)
            for start in range(0, len(buffer), 1 << 16):
                shift = start // 65536 % 65536
                buffer[start : start + 65536] = (block[shift:] + block[:shift])[: len(buffer) - start]
                buffer[start] ^= (version ^ like) & 0xFF
        await self._seal(arena, layout, value["version"])

    async def _reserve(self, nbytes: int) -> tuple[Layout, Arena]:
        layout = Layout.from_tensors({"w": ("uint8", (nbytes,))})
        arena = await self.holdings.reserve(layout)
        if arena is None:
            raise RuntimeError("no arena is free; is memory short?")
        return layout, arena

    async def _seal(self, arena: Arena, layout: Layout, version: int) -> None:
        info = await self.holdings.seal(arena, layout, version)
        tell(published=[version, info.digest])

    async def announce(self, value: list[Any]) -> None:
        self.follower.published([VersionName(value[0], value[1])])

    async def report(self) -> None:
        seen = -1
        while True:
            info = await self.holdings.wait(seen, 3600)
            if info is None:
                continue
            seen = info.version
            at = time.monotonic()
            await asyncio.sleep(0)
            hop = self.follower.hops[-1] if self.follower.hops else None
            told = {**asdict(hop), "name": str(hop.name)} if hop else None
            tell(held=seen, digest=info.digest, at=at, hop=told)

    async def report_progress(self) -> None:
        told = {"quarter": -1, "nearly": -1}
        while True:
            await asyncio.sleep(0.01)
            pull = self.follower.receiving.pull if self.follower.receiving else None
            if pull is None or pull.header is None or pull.missing is None:
                continue
            version, missing, chunks = pull.header.name.version, len(pull.missing), pull.header.chunks
            for what, limit in (("quarter", 0.75 * chunks), ("nearly", 2 * (self.follower.tuning.grain or 1))):
                if missing <= limit and told[what] != version:
                    told[what] = version
                    tell(**{what: version})


def open_transport(arguments: argparse.Namespace) -> Transport:
    """TCP; or the RDMA device that was named."""
    secret = b"a secret for benchmarks and tests"
    if not arguments.device:
        return TcpTransport(
            secret=secret, run="demo", relay=arguments.name, bind=arguments.bind, stall_s=arguments.stall_s
        )
    port, gid = select(active_ports(), wanted=arguments.device)
    return VerbsTransport(port, gid, secret=secret, run="demo", relay=arguments.name, stall_s=arguments.stall_s)


def tell(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--device", default="", help="RDMA device to use instead of TCP")
    parser.add_argument("--stall-s", type=float, default=2.0, help="silence after which a peer counts as dead")
    parser.add_argument("--chunk-kib", type=int, default=1024)
    parser.add_argument("--piece-kib", type=int, default=0, help="0: computed from the chain's length")
    parser.add_argument("--retain", type=int, default=1, help="versions held; differences need 2")
    parser.add_argument("--whole", action="store_true", help="ask for no differences")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="pause before each piece that is sent")
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--silent", action="store_true", help="tell nothing of quarter and nearly: to look takes time")
    parser.add_argument("--unchecked", action="store_true", help="take chunks as they come: what the way itself costs")
    parser.add_argument("--rate", type=float, default=1e9, help="what the first transfer takes the links for, bytes/s")
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    asyncio.run(Node(parser.parse_args()).run())


if __name__ == "__main__":
    main()
