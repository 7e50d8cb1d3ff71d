"""What is checked of weights before an engine touches its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from laminar.config import config_from
from laminar.errors import WeightsError
from laminar.relay.tensors import layout_of
from laminar.workers.engines.base import FolderWeights
from laminar.workers.engines.weights import ModelTensors, opened

TENSORS = {"model.embed_tokens.weight": torch.arange(24.0).view(8, 3), "model.norm.weight": torch.ones(3)}
HEAD = {"lm_head.weight": torch.zeros(8, 3)}
CHUNK = 1 << 20


def write(folder: Path, tensors: dict[str, torch.Tensor], *, tied: bool = True, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8, "tie_word_embeddings": tied}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def read(folder: Path, model: ModelTensors) -> dict[str, torch.Tensor]:
    with opened(FolderWeights(str(folder), 0, ""), model, chunk_bytes=CHUNK) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def test_shards_read_as_one_file_does(tmp_path: Path) -> None:
    model = ModelTensors.of_folder(write(tmp_path / "one", TENSORS), "float32")
    found = read(write(tmp_path / "two", TENSORS, shards=2), model)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_a_tied_head_and_computed_buffers_are_neither_needed_nor_an_error(tmp_path: Path) -> None:
    model = ModelTensors.of_folder(write(tmp_path / "a", TENSORS), "float32")
    buffers = {"model.rotary_emb.inv_freq": torch.ones(2)}
    assert read(write(tmp_path / "b", TENSORS | HEAD | buffers), model).keys() == TENSORS.keys()
    model.check_layout(layout_of(TENSORS | HEAD), "version 1")


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    model = ModelTensors.of_folder(write(tmp_path / "a", TENSORS | HEAD, tied=False), "float32")
    with pytest.raises(
        WeightsError, match=r"lacks 1 tensors of the served model \(3 tensors\), such as 'lm_head.weight'"
    ):
        read(write(tmp_path / "b", TENSORS, tied=False), model)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = ModelTensors.of_folder(write(tmp_path / "a", TENSORS), "float32")
    with pytest.raises(WeightsError, match=r"has 1 tensors unknown to the served model.*'model.extra'"):
        model.check_layout(layout_of(TENSORS | {"model.extra": torch.ones(1)}), "version 3")
    with pytest.raises(WeightsError, match=r"'model.norm.weight' of shape \(4,\), the served model needs \(3,\)"):
        model.check_layout(layout_of(TENSORS | {"model.norm.weight": torch.ones(4)}), "version 3")
    with pytest.raises(WeightsError, match=r"as bfloat16, this engine serves float32.*same model\.dtype"):
        model.check_layout(layout_of(TENSORS, torch.bfloat16), "version 3")


def test_a_torn_file_is_an_error_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", TENSORS)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(WeightsError, match=r"cannot read .*model\.safetensors"):
        ModelTensors.of_folder(folder, "float32")
    with pytest.raises(WeightsError, match=r"config\.json"):
        ModelTensors.of_folder(tmp_path / "nowhere", "float32")


def test_the_factory_makes_what_the_config_names_and_imports_only_that(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from laminar.config import config_from\n"
        "from laminar.workers.engines import create_engine\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
        "config = config_from({'model': {'path': 'm'}, 'rollout': {'engine': 'vllm'}})\n"
        "engine = create_engine(config, Path('m'))\n"
        "assert type(engine).__name__ == 'VllmEngine' and engine.version == -1\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    from laminar.workers.engines import create_engine

    config = config_from(
        {
            "model": {"path": "m"},
            "sampling": {"samples_per_prompt": 5},
            "rollout": {"engine": "transformers", "max_running": 5},
        }
    )
    engine = create_engine(config, tmp_path)
    assert type(engine).__name__ == "TransformersEngine"
    assert engine.version == -1
