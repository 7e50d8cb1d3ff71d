"""The vLLM engine's process: it dies with its rollout, and its own death is seen (case 22)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from laminar.errors import EngineError
from laminar.workers.engines.base import FolderWeights
from laminar.workers.engines.vllm import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(240)]

ROLLOUT = """
import asyncio, signal, sys
from laminar.workers.engines.vllm import VllmEngine

async def main():
    engine = VllmEngine(sys.argv[1], dtype="float32", max_running=4, max_model_len=128, kv_cache_mib=16)
    starting = asyncio.ensure_future(engine.start())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, starting.cancel)
    await starting
    print("started", flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def start_rollout(tmp_path: Path, model_folder: Path, temporary: Path | None = None) -> subprocess.Popen[str]:
    script = tmp_path / "rollout.py"
    script.write_text(ROLLOUT)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(temporary or tmp_path)}
    return subprocess.Popen(
        [sys.executable, str(script), str(model_folder)], stdout=subprocess.PIPE, text=True, env=environment
    )


def engine_processes_of(rollout: subprocess.Popen[str]) -> list[psutil.Process]:
    """Waits for vLLM to spawn the engine's process; all child processes at that moment."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = psutil.Process(rollout.pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("spawn_main" in " ".join(child.cmdline()) for child in children):
                return children
        time.sleep(0.01)
    raise AssertionError("no engine process within 120 s")


def all_end_within(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    return not alive


def kill_when_started(rollout: subprocess.Popen[str]) -> None:
    assert rollout.stdout is not None
    while (line := rollout.stdout.readline()) and "started" not in line:
        pass
    children = psutil.Process(rollout.pid).children(recursive=True)
    assert line and children
    rollout.send_signal(signal.SIGKILL)
    rollout.wait(10)
    assert all_end_within(children, 5)


def test_the_engine_dies_with_a_rollout_that_is_killed_and_its_sockets_go(tmp_path: Path, model_folder: Path) -> None:
    """Those of the killed one when the next begins. A socket's path is too short for pytest's folders."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        kill_when_started(start_rollout(tmp_path, model_folder, Path(place)))
        (left,) = Path(place).glob("laminar-vllm-*")
        assert any(path.is_socket() for path in left.iterdir())
        assert not any(path.is_socket() for path in Path(place).iterdir())
        kill_when_started(start_rollout(tmp_path, model_folder, Path(place)))
        (other,) = Path(place).glob("laminar-vllm-*")
        assert other != left


def test_the_engine_dies_with_a_rollout_that_is_killed_while_it_starts(tmp_path: Path, model_folder: Path) -> None:
    """vLLM alone would have the orphan wait five minutes for its rollout."""
    rollout = start_rollout(tmp_path, model_folder)
    children = engine_processes_of(rollout)
    rollout.send_signal(signal.SIGKILL)
    rollout.wait(10)
    assert all_end_within(children, 15)


def test_a_rollout_that_is_told_to_stop_while_vllm_starts_ends_in_seconds(tmp_path: Path, model_folder: Path) -> None:
    rollout = start_rollout(tmp_path, model_folder)
    children = engine_processes_of(rollout)
    rollout.send_signal(signal.SIGTERM)
    rollout.wait(10)
    assert all_end_within(children, 10)


async def test_a_killed_engine_is_seen_within_seconds_and_closes(model_folder: Path) -> None:
    """Case 22: the engine is killed; whoever generates learns it, so does `check`, and closing takes no time."""
    engine = VllmEngine(model_folder, dtype="float32", max_running=4, max_model_len=2048, kv_cache_mib=16)
    await engine.start()
    await engine.load(FolderWeights(str(model_folder), 0, ""))
    under_way = asyncio.Event()

    async def generate() -> None:
        stream = engine.generate("doomed", [1, 2, 3], max_tokens=2000, temperature=1.0, stop_token_ids=[])
        async for _ in stream:
            under_way.set()

    generating = asyncio.create_task(generate())
    await asyncio.wait_for(under_way.wait(), 30)
    os.kill(engine.process_id, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError, match="doomed failed in vLLM"):
        await asyncio.wait_for(generating, 10)
    assert time.monotonic() - began < 5
    with pytest.raises(EngineError, match="has died"):
        await engine.check()
    with pytest.raises(EngineError, match="has died"):
        await engine.load(FolderWeights(str(model_folder), 1, ""))
    assert engine.version == 0
    began = time.monotonic()
    await engine.close()
    assert time.monotonic() - began < 5
    with pytest.raises(EngineError, match="not running"):
        await engine.check()
