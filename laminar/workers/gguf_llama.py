"""A Llama in a GGUF file, as a Hugging Face folder: weights dequantised to float32.

Config and tokenizer come from transformers. It can load the weights too, but needs `accelerate` for it and refuses to
save them; they are read here with `gguf` alone. GGUF stores the rows of the query and key projections in the order of
interleaved rotary pairs, Hugging Face in two halves: they are put back.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from laminar.errors import ConfigError

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Write model and tokenizer of the GGUF file `source` into `folder`. Raises ConfigError if it is no Llama."""
    config = _plain_config(source)
    weights = _read_weights(source, config.num_attention_heads, config.num_key_value_heads)
    build: Any = LlamaForCausalLM
    model = build(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ConfigError(f"{source} does not hold the tensors of a Llama: {missing} missing, {unexpected} unknown")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _plain_config(source: Path) -> Any:
    settings = AutoConfig.from_pretrained(source.parent, gguf_file=source.name).to_dict()
    if settings.get("model_type") != "llama":
        raise ConfigError(f"{source} holds a {settings.get('model_type')!r} model; only llama is converted")
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    # A float32 in the file, whose nearest double has a tail of digits.
    settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 10)
    config = LlamaConfig(**settings)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float32
    return config


def _read_weights(source: Path, heads: int, key_value_heads: int) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in GGUFReader(source).tensors:
        name = _hugging_face_name(source, tensor.name)
        # `dequantize` may return a view of the read-only mapping of the file.
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True))
        if name.endswith("q_proj.weight"):
            value = _halves(value, heads)
        elif name.endswith("k_proj.weight"):
            value = _halves(value, key_value_heads)
        weights[name] = value
    return weights


def _hugging_face_name(source: Path, name: str) -> str:
    if name in TOP:
        return TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER:
        raise ConfigError(f"{source} holds the tensor {name!r}, which no Llama has")
    return f"model.layers.{match[1]}.{LAYER[match[2]]}.weight"


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads x size, inputs]: rows of each head from (pair, part) order to (part, pair)."""
    rows, inputs = weight.shape
    return weight.view(heads, rows // heads // 2, 2, inputs).transpose(1, 2).reshape(rows, inputs).contiguous()
