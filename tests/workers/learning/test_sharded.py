"""A learner of several processes does what one on one device does, and none of them outlives another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.config import config_from
from laminar.errors import ConfigError, LaminarError, WeightsError
from laminar.relay.client import RelayConnection
from laminar.relay.server import RelayServer
from laminar.workers.learning import create_learner
from laminar.workers.learning.base import Sample
from laminar.workers.learning.batching import MicroBatch, pack
from laminar.workers.learning.inputs import row_of, scored_mask
from laminar.workers.learning.learner import TorchLearner
from laminar.workers.learning.sharded.learner import LeadingLearner
from laminar.workers.learning.sharded.parameters import _dealt, _has_later_tokens
from laminar.workers.learning.sharded.ranks import RankLost
from laminar.workers.learning.sharded.wire import pack_samples, unpack_samples

MIXED = [[(5, 1.0), (3, 0.0), (7, 0.0)], [(4, 1.0), (6, 0.0)], [(2, 1.0), (9, 0.5)]]
SILENT = [[(3, 0.0), (4, 0.0)]]
SHORT = [[(1, 1.0), (1, 0.0)], [(5, 1.0), (3, 0.0)], [(4, 1.0), (2, 0.0)]]
"""A micro-batch of its first group would have no second part on the shared path."""


@pytest.fixture
def leader_of(learner_of: Any) -> Iterator[Callable[..., LeadingLearner]]:
    """One after another: a process is in one group at a time."""
    made: list[LeadingLearner] = []

    def make(devices: int = 2, **settings: Any) -> LeadingLearner:
        while made:
            made.pop().close()

        def kind(folder: Path, config: Any, **how: Any) -> LeadingLearner:
            return LeadingLearner(folder, config, devices=devices, **how)

        made.append(learner_of(kind=kind, threads=1, **settings))
        return made[-1]

    yield make
    while made:
        made.pop().close()


def ranks_of(process: int) -> list[psutil.Process]:
    def is_rank(child: psutil.Process) -> bool:
        try:
            return "laminar.workers.learning.sharded.process" in child.cmdline()
        except psutil.NoSuchProcess:  # a zombie, also one that another test left to this process
            return False

    return [child for child in psutil.Process(process).children(recursive=True) if is_rank(child)]


def assert_near(found: float | None, expected: float | None, tolerance: float, name: str = "") -> None:
    if expected is None:
        assert found is None, name
    else:
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), name


def assert_alike(found: Any, expected: Any, *, tolerance: float) -> None:
    assert [(s.group, s.sample, s.advantage, s.tokens) for s in found.samples] == [
        (s.group, s.sample, s.advantage, s.tokens) for s in expected.samples
    ]
    for one, other in zip(found.samples, expected.samples, strict=True):
        assert_near(one.mean_logprob, other.mean_logprob, tolerance)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        if not name.endswith("_s"):
            assert_near(found.metrics[name], value, tolerance, name)


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (2, {"dtype": "bfloat16", "kl_coefficient": 0.05}),
        pytest.param(3, {"share_prompts": False}, marks=pytest.mark.slow),
        pytest.param(3, {"dtype": "bfloat16", "loss": "gspo", "aggregation": "sequence"}, marks=pytest.mark.slow),
        pytest.param(2, {"skip_no_signal": False, "mask_truncated": True}, marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_as_one_does(learner_of, leader_of, batch_of, weights_of, tmp_path, devices, settings):
    """Whatever is skipped, shared or left over when the micro-batches are dealt out; checkpoints and exports are those
    of one device, so that the number of devices may change."""
    settings = {"micro_batch_tokens": 32, "warmup_steps": 2, **settings}
    coarse = settings.get("dtype") == "bfloat16"
    tolerance = 2e-3 if coarse else 1e-4
    one, leader = learner_of(**settings), leader_of(devices, **settings)
    assert leader.layout == one.layout and leader.writers == devices
    # Of SHORT several processes compute no prompt apart, which bfloat16 rounds otherwise.
    for step, groups in enumerate([MIXED, SILENT, MIXED if coarse else SHORT, MIXED]):
        batch = batch_of(groups, seed=step)
        fresh = [Sample(**{**vars(s), "version": step}) for s in batch_of(MIXED, seed=9)]
        result = leader.train(batch, lambda fresh=fresh: fresh)
        assert_alike(result, one.train(batch, lambda fresh=fresh: fresh), tolerance=tolerance)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    trained, alike = (torch.frombuffer(bytearray(weights_of(x)), dtype=dtype) for x in (leader, one))
    assert torch.allclose(trained, alike, rtol=1e-2, atol=1e-3)

    for folder in ("checkpoint", "export", "export of one"):
        (tmp_path / folder).mkdir()
    leader.save(tmp_path / "checkpoint")
    leader.export(tmp_path / "export")
    resumed = learner_of(**settings)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.version == leader.version and weights_of(resumed) == weights_of(leader)
    resumed.export(tmp_path / "export of one")
    assert {p.name: p.read_bytes() for p in (tmp_path / "export").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "export of one").iterdir()
    }
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == dtype
    assert_alike(leader.train(batch_of(MIXED)), resumed.train(batch_of(MIXED)), tolerance=tolerance)


@pytest.mark.slow
def test_a_restarted_leader_takes_the_same_steps(learner_of, leader_of, batch_of, weights_of, tmp_path):
    """The same bits, whether the checkpoint was written by as many processes or by one; and settings reach all."""
    one = learner_of(dtype="bfloat16", micro_batch_tokens=32)
    one.train(batch_of(MIXED))
    one.save(tmp_path)
    runs = []
    for _ in range(2):
        leader = leader_of(3, dtype="bfloat16", micro_batch_tokens=64)
        leader.load(tmp_path)
        leader.configure({"trainer.learning_rate": 0.01, "trainer.micro_batch_tokens": 32})
        results = [leader.train(batch_of(MIXED, seed=n)) for n in range(2)]
        runs.append(([r.samples for r in results], [r.metrics["grad_norm"] for r in results], weights_of(leader)))
    assert runs[0] == runs[1]


@pytest.mark.slow
async def test_each_process_writes_its_part_into_the_arena_or_says_why_not(leader_of, batch_of, weights_of, tmp_path):
    leader = leader_of(3, dtype="bfloat16")
    leader.train(batch_of(MIXED))
    expected = weights_of(leader)
    async with RelayServer(tmp_path / "relay.sock", run="demo", chunk_bytes=1024) as server:
        connection = RelayConnection(server.socket_path, run="demo")

        def publish() -> None:
            arena = connection.reserve(leader.layout, writers=leader.writers)
            assert arena is not None
            wrote = leader.write_weights(arena.buffer, arena.invitation)
            assert 0 < wrote < sum(spec.nbytes for spec in leader.layout.tensors)
            arena.seal(leader.version, wrote=wrote)
            with connection.open(leader.version) as mapped:
                assert bytes(mapped.buffer[: len(expected)]) == expected
            gone = replace(arena.invitation, socket=str(tmp_path / "gone.sock"))
            with pytest.raises(WeightsError, match=r"rank 1 of the trainer: relay at .*gone\.sock"):
                leader.write_weights(memoryview(bytearray(leader.layout.total_bytes)), gone)

        await asyncio.to_thread(publish)


def test_what_one_process_refuses_all_refuse_and_go_on(leader_of, learner_of, batch_of, weights_of, tmp_path):
    leader = leader_of()
    with pytest.raises(LaminarError, match="twice in the batch"):
        leader.train([*batch_of(MIXED), *batch_of(MIXED)])
    with pytest.raises(ConfigError, match="does not shape"):
        leader.configure({"trainer.checkpoint_every": 3})
    other = learner_of(dtype="bfloat16")
    other.save(tmp_path)
    with pytest.raises(WeightsError, match="model and dtype may not change"):
        leader.load(tmp_path)
    leader.train(batch_of(MIXED))
    one = learner_of()
    one.train(batch_of(MIXED))
    assert len(weights_of(leader)) == len(weights_of(one))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_rank_that_dies_ends_the_step_and_is_named(leader_of, batch_of, when):
    leader = leader_of(3)
    victim = ranks_of(os.getpid())[0]
    if when == "between steps":
        victim.kill()
    else:
        victim.suspend()  # the others wait for it in a collective
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -9 {victim.pid}"])
    before = time.monotonic()
    with pytest.raises(RankLost, match=rf"process {victim.pid}\) ended by SIGKILL"):
        leader.train(batch_of(MIXED))
        leader.train(batch_of(MIXED))
    assert time.monotonic() - before < 60


LONELY = """
import sys, time
from pathlib import Path
from laminar.config import TrainerConfig
from laminar.workers.learning.sharded.learner import LeadingLearner
learner = LeadingLearner(Path(sys.argv[1]), TrainerConfig(threads=1), temperature=1.0, dtype="float32", devices=3)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_leader(model_folder, number):
    leader = subprocess.Popen([sys.executable, "-c", LONELY, str(model_folder)], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None and leader.stdout.readline() == "ready\n"
    ranks = ranks_of(leader.pid)
    assert len(ranks) == 2
    ranks[0].send_signal(signal.SIGTERM)  # a signal for all does not end them before the trainer
    leader.send_signal(number)
    leader.wait(10)
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert len(gone) == 2 and not alive


def test_more_devices_than_gpus_are_refused(model_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = config_from({"model": {"path": str(model_folder)}, "trainer": {"devices": 2}})
    with pytest.raises(ConfigError, match=r"trainer\.devices = 2, but the trainer sees 1 GPUs"):
        create_learner(config, model_folder)


def test_samples_travel_whole(batch_of):
    batch = batch_of(MIXED)
    odd = Sample(7, 1, [3], [], [], [], -1e-300, 4, truncated=True)
    assert unpack_samples(pack_samples([*batch, odd]).to_pybytes()) == [*batch, odd]
    assert unpack_samples(pack_samples([]).to_pybytes()) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_micro_batch_is_dealt_out_once_and_all_ranks_have_as_many(batch_of, ranks):
    batch = batch_of(MIXED)
    micros = pack([row_of(i, s, scored_mask(s)) for i, s in enumerate(batch)], budget=16, share_prompts=True)
    assert len(micros) > 3 and all(map(_has_later_tokens, micros))
    hands: list[list[Any]] = [list(_dealt(micros, rank, ranks, True)) for rank in range(ranks)]
    assert {len(hand) for hand in hands} == {-(-len(micros) // ranks)}
    counted: list[MicroBatch] = [one.micro for hand in hands for one in hand if one.counts]
    assert sorted(m.rows for m in counted) == sorted(m.rows for m in micros)
    assert list(_dealt([], 0, ranks, True)) == []


def test_learner_is_the_plain_one_for_one_device(model_folder):
    config = config_from({"model": {"path": str(model_folder)}})
    assert type(create_learner(config, model_folder)) is TorchLearner
