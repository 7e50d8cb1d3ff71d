"""Trainers of several processes: FSDP2 shards, written in parallel, are the version that one process would write."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laminar.errors import WeightsError
from laminar.relay.server import RelayServer
from laminar.relay.tensors import copy_blocks, layout_of, own_block

TRAINER = Path(__file__).with_name("sharded_trainer.py")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mesh"), [(2, "flat"), (4, "replicated")])
async def test_what_the_ranks_write_together_is_bit_for_bit_what_one_process_writes(
    tmp_path: Path, world: int, mesh: str
) -> None:
    """Two ranks share each tensor; or four do, of which each pair holds the same: then one of the pair writes it."""
    async with RelayServer(tmp_path / "relay.sock", run="demo", chunk_bytes=1024) as server:
        options = [str(server.socket_path), str(tmp_path / "rendezvous")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            await asyncio.create_subprocess_exec(
                sys.executable, str(TRAINER), *options, str(rank), str(world), mesh,
                stdout=asyncio.subprocess.PIPE, env=environment,
            )
            for rank in range(world)
        ]  # fmt: skip
        async with asyncio.timeout(240):
            outputs = [(await rank.communicate())[0].decode().split() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world
        together, alone = outputs[0]
        versions = {held.info.version: held.info.digest for held in server.holdings.versions()}
        assert versions == {1: together, 2: alone} and together == alone


def test_of_what_is_not_sharded_rank_0_writes_all() -> None:
    tensors = {"w": torch.arange(6.0), "b": torch.ones(2, 3)}
    layout = layout_of(tensors, torch.bfloat16)
    data = bytearray(layout.total_bytes)
    assert copy_blocks(memoryview(data), layout, tensors, 1) == 0 and not any(data)
    assert copy_blocks(memoryview(data), layout, tensors, 0) == 24 and any(data)


def test_a_placement_that_makes_no_boxes_is_refused() -> None:
    from torch.distributed.tensor import Partial

    tensor: Any = SimpleNamespace(placements=(Partial(),))
    with pytest.raises(WeightsError, match="only Replicate and Shard can be published"):
        own_block(tensor, 0)
