"""One rank's part of the parameters: FSDP2's shards, on this process's device.

Parameters stay float32 and sharded; `dtype` is what a layer is gathered and computed in, and gradients are summed over
the ranks in float32. So masters need no copy, and what is published is a cast of this rank's shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from laminar.relay.tensors import copy_blocks, own_block
from laminar.workers.learning.batching import MicroBatch, Row, pack
from laminar.workers.learning.loading import load_model
from laminar.workers.learning.parameters import Parameters, Pass
from laminar.workers.models import copy_tokenizer


class ShardedParameters(Parameters):
    """`mesh`: of one dimension, over all ranks; its device is the one used. See `Parameters` for what it raises."""

    def __init__(self, folder: Path, dtype: torch.dtype, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank: int = mesh.get_local_rank()
        super().__init__(folder, dtype)

    def _own_device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.mesh.device_type == "cuda" else torch.device("cpu")

    def _placed(self, model: Any) -> Any:
        """Layer by layer, so that only one is gathered at a time."""
        policy = MixedPrecisionPolicy(
            param_dtype=None if self.dtype == torch.float32 else self.dtype, reduce_dtype=torch.float32
        )
        for part in (*_layers(model), model):
            sharded = fully_shard(part, mesh=self.mesh, mp_policy=policy)
            # The loss is a sum with the weights of the whole step: gradients of the ranks are added, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        # What is no parameter is whole on each rank.
        return model.to(self.device)

    def _split_masters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def _published(self) -> dict[str, Tensor]:
        published = super()._published()
        return {name: t.to(self.dtype) if name in self.masters else t for name, t in published.items()}

    def reference(self) -> Any:
        return self._placed(load_model(self.folder, torch.float32).requires_grad_(False))

    def passes(self, rows: Sequence[Row], *, budget: int, share_prompts: bool) -> list[Pass]:
        """This rank's share. Each rank has equally many, and all go the same way through the model: a layer is gathered
        by all at once. Where they do not divide, one that does not count makes up the number."""
        micros = pack(rows, budget=budget, share_prompts=share_prompts)
        shared = share_prompts and all(_has_later_tokens(micro) for micro in micros)
        if share_prompts and not shared:
            micros = pack(rows, budget=budget, share_prompts=False)
        return list(_dealt(micros, self.rank, self.mesh.size(), shared))

    def gather_gradients(self) -> None:
        """They are where they belong: FSDP adds each pass's to the shards, in float32."""

    def clip_gradients(self, limit: float) -> float:
        norm: Any = nn.utils.clip_grad_norm_(self.masters.values(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def changed(self) -> None:
        super().changed()
        # A forward pass without a backward one leaves the outermost part gathered, as it was before this change.
        self.model.reshard()

    def _cast(self) -> None:
        if self.dtype != torch.float32:
            for name, master in self.masters.items():
                self.published[name].copy_(master)

    def write(self, buffer: memoryview) -> int:
        return copy_blocks(buffer, self.layout, self.published, self.rank)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On rank 0, on the CPU; empty on the others, which take part all the same."""
        gathered = {}
        for name, tensor in tensors.items():
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if self.rank == 0:
                gathered[name] = whole.cpu()
        return gathered

    @torch.no_grad()
    def fill(self, target: Tensor, stored: Any) -> None:
        block = own_block(target, self.rank)
        assert isinstance(target, DTensor) and block is not None, "masters are sharded over all ranks"
        if 0 not in block.shape:
            target.to_local().copy_(stored[block.slices])

    def export(self, folder: Path) -> None:
        """Rank 0 writes; the others take part."""
        whole = self.whole(self.published)
        if self.rank:
            return
        # A model of its own: transformers' `save_pretrained` of a sharded one would gather by pickled objects.
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self.model.config, dtype=self.dtype)  # type: ignore[no-untyped-call]
        model.load_state_dict(whole, strict=False, assign=True)
        model.tie_weights()
        model.generation_config = self.model.generation_config
        model.config.dtype = self.dtype
        model.save_pretrained(folder)
        copy_tokenizer(self.folder, folder)


def _layers(model: Any) -> list[nn.Module]:
    """The modules that are gathered one at a time: those that the model says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _has_later_tokens(micro: MicroBatch) -> bool:
    """Whether the shared path has a second part here: a first token follows from the prompt alone."""
    return any(block.response_length > 1 for block in micro.blocks)


def _dealt(micros: Sequence[MicroBatch], rank: int, ranks: int, shared: bool) -> Iterator[Pass]:
    """Neighbours are alike in size, since `pack` sorts: in turn, so that the ranks wait little for each other."""
    for start in range(0, len(micros), ranks):
        if start + rank < len(micros):
            yield Pass(micros[start + rank], shared)
        else:
            yield Pass(micros[-1], shared, counts=False)
