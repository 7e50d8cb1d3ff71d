"""What is published of GPUs and models, as far as the cost models need it. Everything here can be replaced in the TOML
file; nothing here is tuned to any result.

| figure                                      | source                                                                |
|---------------------------------------------|-----------------------------------------------------------------------|
| H800: 80 GB at 3.35 TB/s, 989 TFLOP/s bf16   | NVIDIA's data sheet of the Hopper SXM part; dense                     |
| NVLink 400 GB/s, 8 x 400 Gb/s a machine      | the testbed of "Laminar", arXiv 2510.12633, section 8                 |
| layers, heads, KV heads, parameters         | Qwen2.5 technical report, arXiv 2412.15115, and its model cards       |
| 0.64 s and 1.40 s until the trainer goes on  | "Laminar", section 8.3, for 32B and 72B: 102 GB/s onto the master     |
| batch 8,192 = 512 prompts x 16, 2K in, 16K out | "Laminar", section 8; p99 of the lengths ten times the median: 2.2  |
| ahead of the trainer by some steps' batches  | AReaL, arXiv 2505.24298, whose bound of staleness is 4 in most runs   |
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Of one GPU, in bytes, bytes/s and FLOP/s (bf16, dense); `machine_bytes_per_s`: of a machine's network."""

    memory_bytes: float
    memory_bytes_per_s: float
    flops: float
    machine_bytes_per_s: float
    host_bytes_per_s: float
    """From host memory into the GPU (PCIe 5, as measured by most)."""


@dataclass(frozen=True)
class Model:
    """A dense transformer with grouped KV heads, in bf16."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def bytes(self) -> float:
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Of one token in the KV cache: keys and values, two bytes each."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def held_kv_bytes(self, gpus: int) -> float:
        """Of one token, over all GPUs that share the model: more GPUs than KV heads hold copies of them."""
        return self.kv_bytes * max(1.0, gpus / self.kv_heads)

    def can_share(self, gpus: int) -> bool:
        """Whether each of so many GPUs gets equal parts: whole heads, and whole KV heads or one of several copies."""
        return not self.heads % gpus and not (self.kv_heads % gpus and gpus % self.kv_heads)


GPUS = {
    "h800": Gpu(80e9, 3.35e12, 989e12, 400e9, 50e9),
    "h100": Gpu(80e9, 3.35e12, 989e12, 400e9, 50e9),
    "h200": Gpu(141e9, 4.8e12, 989e12, 400e9, 50e9),
    "a100": Gpu(80e9, 2.0e12, 312e12, 200e9, 25e9),
}
MODELS = {
    "qwen2.5-7b": Model(7.61e9, 28, 28, 4),
    "qwen2.5-32b": Model(32.5e9, 64, 40, 8),
    "qwen2.5-72b": Model(72.7e9, 80, 64, 8),
}
MASTER_BYTES_PER_S = 102e9
"""Trainer to master relay; also taken for a hop from relay to relay, which is host memory to host memory too."""
