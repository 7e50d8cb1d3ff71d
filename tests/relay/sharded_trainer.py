"""One process of a trainer that is sharded by FSDP2: it writes its shards into an arena that all of them share.

    python sharded_trainer.py SOCKET RENDEZVOUS RANK WORLD MESH    MESH: `flat`, or `replicated`: two copies

Rank 0 prints the digest of the version that came of it, and that of the same weights written by one process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from laminar.relay.client import RelayConnection
from laminar.relay.tensors import copy_blocks, copy_into, layout_of


def model() -> Any:
    """Odd sides: no shard is as large as another, and some ranks get nothing of a tensor."""
    torch.manual_seed(7)
    layers = [torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Linear(7, 13, bias=False)) for _ in range(2)]
    return torch.nn.Sequential(torch.nn.Embedding(11, 13), *layers, torch.nn.LayerNorm(13), torch.nn.Linear(13, 1))


def main(socket: str, rendezvous: str, rank: int, world: int, mesh: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    shape = {"flat": (world,), "replicated": (2, world // 2)}[mesh]
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
    sharded = model()
    whole = {name: tensor.clone() for name, tensor in sharded.state_dict().items()}
    for layer in sharded[1:3]:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(sharded, mesh=device_mesh)
    tensors = sharded.state_dict()
    layout = layout_of(tensors, torch.bfloat16)
    connection = RelayConnection(socket, run="demo")

    ticket: list[str | None] = [None]
    arena = connection.reserve(layout, writers=world) if rank == 0 else None
    if arena is not None:
        ticket[0] = arena.ticket
    dist.broadcast_object_list(ticket, src=0)
    if arena is None:
        joined = connection.join(str(ticket[0]), layout)
        joined.wrote(copy_blocks(joined.buffer, layout, tensors, rank))
    else:
        together = arena.seal(1, wrote=copy_blocks(arena.buffer, layout, tensors, rank)).digest
        alone = connection.reserve(layout)
        assert alone is not None
        copy_into(alone.buffer, layout, whole)
        sys.stdout.write(f"{together} {alone.seal(2).digest}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
