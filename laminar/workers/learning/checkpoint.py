"""What a learner's folder holds: tensors as safetensors, the rest as JSON, each file checked by its digest.

    master.safetensors      the float32 master weights, by Hugging Face name
    optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>: AdamW's moments; empty before the first update
    learner.json            LearnerState and the BLAKE3 of the two files

There is no randomness in a step (no dropout), so there is no generator state to keep. The folder is made visible
atomically by whoever owns it; within it nothing is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import blake3
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from laminar.errors import WeightsError

FORMAT = 1
FORMER = {"nonfinite_in_a_row"}
"""Values that older checkpoints hold and nobody needs any more."""
MASTER, OPTIMIZER, STATE = "master.safetensors", "optimizer.safetensors", "learner.json"


@dataclass(frozen=True)
class LearnerState:
    """`updates`: of the optimizer (steps without signal make none)."""

    version: int
    updates: int
    layout_digest: str
    dtype: str


def write(folder: Path, state: LearnerState, master: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    save_file(dict(master), folder / MASTER)
    save_file(dict(moments), folder / OPTIMIZER)
    digests = {name: _digest(folder / name) for name in (MASTER, OPTIMIZER)}
    record = {"format": FORMAT, "state": asdict(state), "blake3": digests}
    (folder / STATE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@contextmanager
def opened(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Master weights and moments of a folder that `verify` has passed, read (on the CPU) when they are sliced:
    `master[name][:]`, or `master[name][2:4, 1:]` for a part."""
    with safe_open(folder / MASTER, "pt") as master, safe_open(folder / OPTIMIZER, "pt") as moments:
        yield tuple({name: file.get_slice(name) for name in file.keys()} for file in (master, moments))  # type: ignore


def verify(folder: Path) -> LearnerState:
    """Read every byte. Raises WeightsError if a file is missing, damaged or unknown."""
    try:
        record = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"the learner state {folder / STATE} is unreadable: {error}; use another checkpoint"
        ) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else record
        raise WeightsError(f"{folder / STATE} has format {found!r}; this version of Laminar reads {FORMAT}")
    state = _state(folder, record.get("state"))
    promised = record.get("blake3")
    for name in (MASTER, OPTIMIZER):
        _verify(folder / name, promised.get(name) if isinstance(promised, dict) else None)
    return state


def _state(folder: Path, values: object) -> LearnerState:
    names = {field.name for field in fields(LearnerState)}
    if not isinstance(values, dict) or set(values) - FORMER != names:
        raise WeightsError(f"{folder / STATE} does not hold exactly {sorted(names)}; use another checkpoint")
    return LearnerState(**{name: values[name] for name in names})


def _verify(path: Path, promised: object) -> None:
    if not path.is_file():
        raise WeightsError(f"the checkpoint file {path} is missing; use another checkpoint")
    found = _digest(path)
    if found != promised:
        raise WeightsError(
            f"the checkpoint file {path} is damaged: BLAKE3 {found[:12]}, written as {str(promised)[:12]}; "
            "use another checkpoint"
        )


def _digest(path: Path) -> str:
    return str(blake3.blake3().update_mmap(path).hexdigest())
