"""From a WeightSource to tensors that an engine may load: nothing is handed out before it was checked.

    relay socket  -> map, compare version, digest, names, shapes, dtypes -> zero-copy views
    folder        -> read,                 names, shapes, cast, digest   -> tensors

The relay has verified the bytes against the digest when the version came in, so here the digest is compared, not
computed again. A folder was verified by nobody: its digest is computed, unless the source has none (a checkpoint of
a version that was never published).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from laminar.errors import WeightsError
from laminar.relay.client import RelayConnection
from laminar.relay.layout import Layout, verify
from laminar.relay.tensor_parallel import TensorParallel, cut_of
from laminar.relay.tensors import DTYPES, NAMES, copy_into, layout_of, views
from laminar.workers.engines.base import FolderWeights, RelayWeights, WeightSource

Tensors = dict[str, torch.Tensor]
TIED_HEAD = "lm_head.weight"
COMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Old exports carry this buffer; every model computes it from its config."""


@dataclass(frozen=True)
class ModelTensors:
    """What a model needs: `shapes` by Hugging Face name, without a head that is tied to the embeddings."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    """Type of the served floating-point tensors."""
    tied: bool
    vocabulary: int
    """Token ids are 0 to vocabulary - 1."""

    @classmethod
    def of_folder(cls, folder: str | Path, dtype: str) -> ModelTensors:
        """Read from headers only. Raises WeightsError if the folder has no config.json or safetensors."""
        config = _config(folder)
        text = config.get("text_config", config)
        # Absent means tied for the families whose class defaults to it; their files then lack the head.
        shapes = {name: shape for file in _files(folder) for name, shape in _header(file).items()}
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", TIED_HEAD not in shapes)))
        return cls(_needed(shapes, tied), DTYPES[dtype], tied, int(text["vocab_size"]))

    def check_names(self, found: Mapping[str, tuple[int, ...]], origin: str) -> None:
        """Raises WeightsError naming the first tensor that is missing, unknown or of another shape."""
        found = _needed(found, self.tied)
        missing, unknown = self.shapes.keys() - found.keys(), found.keys() - self.shapes.keys()
        for kind, which, names in (("lacks", "of", missing), ("has", "unknown to", unknown)):
            if names:
                raise WeightsError(
                    f"{origin} {kind} {len(names)} tensors {which} the served model "
                    f"({len(self.shapes)} tensors), such as {min(names)!r}; it was made from another model"
                )
        for name, shape in self.shapes.items():
            if found[name] != shape:
                raise WeightsError(
                    f"{origin} has tensor {name!r} of shape {found[name]}, the served model needs {shape}; it was made "
                    "from another model"
                )

    def check_layout(self, layout: Layout, origin: str) -> None:
        """Names and shapes as `check_names`; a floating-point tensor must have the served dtype."""
        self.check_names({t.name: t.shape for t in layout.tensors}, origin)
        for spec in layout.tensors:
            if DTYPES[spec.dtype].is_floating_point and DTYPES[spec.dtype] != self.dtype:
                raise WeightsError(
                    f"{origin} has tensor {spec.name!r} as {spec.dtype}, this engine serves {NAMES[self.dtype]}; "
                    "trainer and rollouts must use the same model.dtype"
                )


def check_ranks(folder: str | Path, model: ModelTensors, ranks: int) -> None:
    """Raises ConfigError, or WeightsError naming the tensor, if the model cannot be dealt out to so many devices.
    Tensors of other models than `tensor_parallel` has rules for are left to the engine's own judgement."""
    config = _config(folder)
    plan = TensorParallel.of_config(config.get("text_config", config), ranks)
    layout = Layout.from_tensors({name: (NAMES[model.dtype], shape) for name, shape in model.shapes.items()})
    for spec in layout.tensors:
        if cut_of(spec) is not None:
            plan.block(spec, 0)


def _config(folder: str | Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise WeightsError(f"cannot read {folder}/config.json ({e}); give a Hugging Face model folder") from e
    return config


@contextmanager
def opened(source: WeightSource, model: ModelTensors, *, chunk_bytes: int) -> Iterator[Tensors]:
    """Checked tensors of `source` by name, for the time of the `with` block only: copy out of them, keep none.

    `chunk_bytes` is the relay's, on which digests depend. Raises WeightsError before anything is yielded.
    """
    opener = _relay(source, model) if isinstance(source, RelayWeights) else _folder(source, model, chunk_bytes)
    with opener as tensors:
        yield tensors


@contextmanager
def _relay(source: RelayWeights, model: ModelTensors) -> Iterator[Tensors]:
    origin = f"version {source.version} of the relay at {source.socket}"
    mapped = RelayConnection(source.socket).open(source.version)
    with mapped:
        if (mapped.version, mapped.digest) != (source.version, source.digest):
            raise WeightsError(
                f"{origin} is version {mapped.version} with digest {mapped.digest[:12]}, expected "
                f"{source.digest[:12]}; the coordination names other weights than the relay holds"
            )
        model.check_layout(mapped.layout, origin)
        tensors = views(mapped.buffer, mapped.layout)
        yield tensors
        tensors.clear()
        # A loader's closures can hold views in reference cycles, and the mapping cannot be closed under them.
        gc.collect()


@contextmanager
def _folder(source: FolderWeights, model: ModelTensors, chunk_bytes: int) -> Iterator[Tensors]:
    origin = f"the folder {source.path}"
    tensors: Tensors = {}
    for file in _files(source.path):
        with _reading(file), safe_open(file, framework="pt", device="cpu") as opened_file:
            tensors.update({name: opened_file.get_tensor(name) for name in opened_file.keys()})
    model.check_names({name: tuple(tensor.shape) for name, tensor in tensors.items()}, origin)
    tensors = {name: tensor for name, tensor in tensors.items() if name in model.shapes}
    if source.digest:
        layout = layout_of(tensors, model.dtype)
        buffer = memoryview(bytearray(layout.total_bytes))
        copy_into(buffer, layout, tensors)
        try:
            verify(buffer, layout, chunk_bytes, source.digest)
        except WeightsError as e:
            raise WeightsError(f"{origin} does not hold version {source.version}: {e}") from e
        tensors = views(buffer, layout)
    yield tensors


def _needed(shapes: Mapping[str, tuple[int, ...]], tied: bool) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(shape)
        for name, shape in shapes.items()
        if not name.endswith(COMPUTED_SUFFIX) and not (tied and name == TIED_HEAD)
    }


def _files(folder: str | Path) -> list[Path]:
    """The safetensors files that the index names, or the only one."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.exists():
        with _reading(index):
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [Path(folder) / name for name in names]
    else:
        files = [Path(folder) / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise WeightsError(f"{file} is missing; give a Hugging Face folder with safetensors")
    return files


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with _reading(file), safe_open(file, framework="pt", device="cpu") as opened_file:
        return {name: tuple(opened_file.get_slice(name).get_shape()) for name in opened_file.keys()}


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError) as e:
        raise WeightsError(f"cannot read {file}: {e}") from e
