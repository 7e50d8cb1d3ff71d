"""The learner on one rank, and the one that leads the others.

Every rank does the same in the same order, as collectives need it: `ShardedLearner` has each part of a step as a call
of its own, and `LeadingLearner` has the others make the call whenever it comes to that part itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from laminar.config import TrainerConfig
from laminar.errors import WeightsError
from laminar.relay.client import RelayConnection
from laminar.relay.tensors import copy_into
from laminar.relay.writing import Invitation
from laminar.workers.learning.advantages import Advantages
from laminar.workers.learning.base import Sample
from laminar.workers.learning.learner import TorchLearner
from laminar.workers.learning.parameters import Parameters
from laminar.workers.learning.sharded.parameters import ShardedParameters
from laminar.workers.learning.sharded.ranks import Ranks
from laminar.workers.learning.sharded.wire import pack_samples
from laminar.workers.learning.tally import RowSums, Tally

COLLECTIVE_S = 600.0
"""That a rank waits for the others in a collective."""


class ShardedLearner(TorchLearner):
    """Rank `rank` of `ranks`, which meet at the file `meeting` and end at the latest with `close`."""

    def __init__(
        self, model_folder: Path, config: TrainerConfig, *, temperature: float, dtype: Literal["bfloat16", "float32"],
        rank: int, ranks: int, meeting: Path,
    ) -> None:  # fmt: skip
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device_type == "cuda":
            torch.cuda.set_device(rank)
        # All on this host: nothing listens on an address that others reach.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        dist.init_process_group(
            "nccl" if self._device_type == "cuda" else "gloo",
            store=dist.FileStore(str(meeting), ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        self._rank, self._ranks = rank, ranks
        super().__init__(model_folder, config, temperature=temperature, dtype=dtype)

    def _load(self, dtype: torch.dtype) -> Parameters:
        return ShardedParameters(self._folder, dtype, init_device_mesh(self._device_type, (self._ranks,)))

    def accumulate(self, batch: Sequence[Sample], version: int) -> Tally:
        """This rank's share of the gradients of step `version`."""
        self._version = version
        return self._accumulate(batch, self._advantages(batch))[0]

    def compare(self, samples: Sequence[Sample]) -> None:
        """All of it on each rank: few samples, and the layers are gathered for all."""
        self._compare(samples)

    def update(self) -> None:
        self._update()

    def gather(self) -> None:
        self._gathered()

    def write_part(self, invitation: Invitation) -> None:
        self.parameters.cast()
        joined = RelayConnection(invitation.socket, run=invitation.run).join(invitation.ticket, self.layout)
        joined.wrote(self.parameters.write(joined.buffer))

    def gather_published(self) -> None:
        self.parameters.cast()
        self.parameters.whole(self.parameters.published)

    def close(self) -> None:
        dist.destroy_process_group()


class LeadingLearner(ShardedLearner):
    """Implements `base.Learner` over `devices` processes, of which this is one. Raises RankLost when another dies."""

    def __init__(
        self, model_folder: Path, config: TrainerConfig, *, temperature: float, dtype: Literal["bfloat16", "float32"],
        devices: int,
    ) -> None:  # fmt: skip
        meeting = Path(tempfile.mkdtemp(prefix="laminar-ranks-"))
        setup = {
            "model_folder": str(model_folder.resolve()),
            "trainer": config.model_dump(mode="json"),
            "temperature": temperature,
            "dtype": dtype,
            "meeting": str(meeting / "store"),
        }
        self._others = Ranks(setup, devices)
        try:
            super().__init__(
                model_folder, config, temperature=temperature, dtype=dtype, rank=0, ranks=devices,
                meeting=meeting / "store",
            )  # fmt: skip
            self._others.started()
        except BaseException:
            self._others.close()
            raise
        finally:
            shutil.rmtree(meeting, ignore_errors=True)

    def configure(self, settings: Mapping[str, Any]) -> None:
        if {**self.settings, **settings} != self.settings:
            with self._others.together("configure", settings=dict(settings)):
                super().configure(settings)

    def _accumulate(self, batch: Sequence[Sample], advantages: Advantages) -> tuple[Tally, int]:
        with self._others.together("accumulate", pack_samples(batch), version=self._version) as answers:
            tally, tokens = super()._accumulate(batch, advantages)
        for answer in answers:
            tally.rows |= {int(index): RowSums(*row) for index, row in answer["rows"].items()}
        return tally, tokens

    def _compare(self, samples: Sequence[Sample]) -> float | None:
        with self._others.together("compare", pack_samples(samples)):
            return super()._compare(samples)

    def _update(self) -> dict[str, float | None]:
        with self._others.together("update"):
            return super()._update()

    def stage(self) -> float:
        with self._others.together("stage"):
            return super().stage()

    @property
    def writers(self) -> int:
        return self._ranks

    def write_weights(self, buffer: memoryview, invitation: Invitation | None = None) -> int:
        self.parameters.cast()
        if invitation is None:
            with self._others.together("gather_published"):
                whole = self.parameters.whole(self.parameters.published)
            copy_into(buffer, self.layout, whole)
            return self.layout.total_bytes
        # Unlike rank 0, which has its mapping, they need the relay: it may have died.
        with self._others.together("write_part", invitation=vars(invitation), refused=WeightsError):
            return self.parameters.write(buffer)

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with self._others.together("gather"):
            return super()._gathered()

    def load(self, folder: Path) -> None:
        self.verify(folder)
        with self._others.together("load", folder=str(folder.resolve())):
            super().load(folder)

    def export(self, folder: Path) -> None:
        with self._others.together("export", folder=str(folder)):
            super().export(folder)

    def close(self) -> None:
        self._others.close()
        super().close()
