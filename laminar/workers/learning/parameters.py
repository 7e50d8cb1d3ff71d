"""The parameters of a model that is trained: what computes, what is updated, and what is published.

    model (computes in `dtype`) ◀──cast── masters (float32, updated) ──cast──▶ published (in `dtype`, the files' names)
                       └── gradients ────────▶ summed in float32

`Parameters` has them on one device. `sharded.parameters.ShardedParameters` has a part of each on this process's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laminar.errors import ConfigError
from laminar.relay.layout import Layout
from laminar.relay.tensors import copy_into, layout_of
from laminar.workers.learning.batching import MicroBatch, Row, pack
from laminar.workers.learning.loading import cast_parameters, load_model
from laminar.workers.models import copy_tokenizer, tensor_names


@dataclass(frozen=True)
class Pass:
    """One forward and one backward pass. `shared`: the prompts are computed once, before their responses. One that does
    not `count` keeps other processes company: nothing of it may reach gradients or metrics."""

    micro: MicroBatch
    shared: bool
    counts: bool = True


class Parameters:
    """All on one device: CUDA where there is one, else the CPU.

    With bfloat16 the model computes and is published in it, while the masters are float32.
    Raises ConfigError for a model that cannot be published as it is."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = self._own_device()
        self.model = self._placed(load_model(folder, torch.float32))
        self.masters = self._split_masters()
        self.published = self._published()
        self.layout: Layout = layout_of(self.published)
        self._stale = False

    def _own_device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _placed(self, model: Any) -> Any:
        """A model as it was loaded, where it computes."""
        return model.to(self.device)

    def _split_masters(self) -> dict[str, nn.Parameter]:
        """float32 masters by name, tied weights once: the model's own parameters, unless it computes in bfloat16."""
        parameters = dict(self.model.named_parameters())
        if self.dtype == torch.float32:
            return parameters
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        cast_parameters(self.model, self.dtype)
        return masters

    def _published(self) -> dict[str, Tensor]:
        """The tensors of the Hugging Face state dict, tied ones once. Raises ConfigError if the folder has other names.

        The engine loads by the names of the model's files. transformers renames some architectures' tensors (fused
        experts, say) when it loads them; publishing those names would fail in the engine, so it is said at the start.
        """
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        tied = {id(p) for p in self.model.parameters()}
        state = self.model.state_dict(keep_vars=True)
        buffers = {name: t.detach() for name, t in state.items() if name not in parameters and id(t) not in tied}
        unknown = sorted((parameters.keys() | buffers.keys()) - tensor_names(self.folder))
        if unknown:
            raise ConfigError(
                f"{len(unknown)} tensors of the loaded model, such as {unknown[0]!r}, are not in the files of "
                f"{self.folder}: transformers renames them on loading, so that an engine could not be sent them. "
                "Save the model once with save_pretrained, or use another architecture"
            )
        return {**parameters, **buffers}

    def reference(self) -> Any:
        """The initial policy, frozen: the folder stays what it was at step 0, also after a resume."""
        reference = self._placed(load_model(self.folder, torch.float32).requires_grad_(False))
        cast_parameters(reference, self.dtype)
        return reference

    def passes(self, rows: Sequence[Row], *, budget: int, share_prompts: bool) -> list[Pass]:
        """What of a step this process computes, in turn: see `pack`."""
        micros = pack(rows, budget=budget, share_prompts=share_prompts)
        return [Pass(micro, any(len(block.rows) > 1 for block in micro.blocks)) for micro in micros]

    def gather_gradients(self) -> None:
        """Add the model's gradients to the masters' in float32: sums over micro-batches would lose bits in bfloat16."""
        if self.dtype == torch.float32:
            return
        for parameter, master in zip(self.model.parameters(), self.masters.values(), strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.to(torch.float32)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def clip_gradients(self, limit: float) -> float:
        """Scale the masters' gradients so that their norm together is at most `limit`; the norm before."""
        return float(nn.utils.clip_grad_norm_(self.masters.values(), limit))

    def changed(self) -> None:
        """The masters were."""
        self._stale = True

    @torch.no_grad()
    def cast(self) -> None:
        """Bring what is computed with and published up to the masters."""
        if self._stale:
            self._cast()
        self._stale = False

    def _cast(self) -> None:
        if self.dtype != torch.float32:
            for parameter, master in zip(self.model.parameters(), self.masters.values(), strict=True):
                parameter.copy_(master)

    def write(self, buffer: memoryview) -> int:
        """Copy what is published into `buffer` at the layout's offsets: this process's part, whose bytes it returns."""
        copy_into(buffer, self.layout, self.published)
        return sum(spec.nbytes for spec in self.layout.tensors)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Masters, or tensors that lie as they do, with all their elements."""
        return {name: tensor.detach() for name, tensor in tensors.items()}

    @torch.no_grad()
    def fill(self, target: Tensor, stored: Any) -> None:
        """Copy a tensor of a checkpoint (`checkpoint.opened`) into a master, or one that lies as it does."""
        target.copy_(stored[:])

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder of what is published."""
        self.model.config.dtype = self.dtype
        self.model.save_pretrained(folder)
        copy_tokenizer(self.folder, folder)
