"""What is checked before a run starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from laminar.config import Config
from laminar.errors import ConfigError
from laminar.relay.memory import INCOMING, SPARE
from laminar.workers.supervisor import preparation

RETAIN = 3


def write_header(folder: Path, tensors: dict[str, list[int]]) -> None:
    """A model's weight file, without the weights."""
    header = json.dumps({name: {"dtype": "F16", "shape": shape} for name, shape in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
def test_a_host_that_cannot_hold_the_relays_versions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, item: int
) -> None:
    """Else no version finds room, and all wait for ever."""
    write_header(tmp_path, {"a": [1024, 1024], "b": [64]})
    config = Config.model_validate({"model": {"path": str(tmp_path), "dtype": dtype}, "relay": {"retain": RETAIN}})
    needed = (1024 * 1024 + 64) * item * (RETAIN + INCOMING + SPARE)
    free: dict[str, Any] = {"bytes": needed}
    monkeypatch.setattr("laminar.relay.memory.available_bytes", lambda: free["bytes"])
    preparation._check_memory(config, tmp_path)
    free["bytes"] -= 1
    with pytest.raises(ConfigError, match=r"the relay needs .* lower relay.retain"):
        preparation._check_memory(config, tmp_path)
