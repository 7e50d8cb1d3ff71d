"""Virtual time; a small finished run as its processes would have left it, for the tests of what looks at stores; and an
S3 service on this machine."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings

from laminar.buffer.records import BatchDecision
from laminar.buffer.schema import EVALUATION, EXPERIENCE, PROMPTS, STEP_METRICS, STEPS

# The examples of a test are the same in every run, so that a red one tells of the change at hand; new ones are looked
# for on purpose: pytest -m hypothesis --hypothesis-profile explore
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile("same")

SAMPLES, STEPS_DONE, START_US = 4, 12, 1_780_000_000_000_000
WORDS = ["<unk>", "what", "is", "two", "plus", "answer", "four", "tool", "says", "five", "done"]


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of waiting for the next timer, moves the clock to it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is scheduled any more: a deadlock")
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """At once, in no time: the clock would run away from a thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualTime(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


@pytest.fixture(scope="session")
def virtual_time() -> asyncio.AbstractEventLoopPolicy:
    """For a module's `event_loop_policy`: a test that waits for seconds of lost replies takes milliseconds."""
    return VirtualTime()


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
    """`make_store(name, tables=True)`: a store of 13 groups of 4: two retired, one of them without signal; 12 steps."""

    def make(name: str = "my-run", *, tables: bool = True, model_folder: str = "") -> Path:
        root = tmp_path / "runs" / name
        root.mkdir(parents=True)
        write_manifest(root, name, model_folder or str(write_tokenizer(tmp_path / "model")))
        if tables:
            write_tables(root)
        return root

    return make


def write_manifest(root: Path, name: str, model_folder: str) -> None:
    from laminar.buffer.manifest import Fingerprints, RunFile

    config = {"run": {"name": name, "max_steps": STEPS_DONE}, "model": {"path": model_folder}}
    prints = Fingerprints(model="a", tokenizer="b", template="c", prompts="d", held_out="e")
    run = RunFile(
        run=name,
        store_id="0123456789abcdef",
        created_at_us=START_US,
        config=config,
        model_folder=model_folder,
        prompts=20,
        held_out=2,
        fingerprints=prints,
    )
    (root / "run.json").write_text(run.model_dump_json())


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def experience_row(group: int, sample: int) -> dict[str, Any]:
    """Group 12 was retired with errors; group 11 without signal; the rest have rewards that rise with the group.
    Sample 3 of each group used a tool: token 2 and 3 are the environment's, and its second turn had another owner."""
    failed, tool = group == 12, sample == 3
    tokens = [5, 6, 7, 8, 5, 9] if tool else [5, 6, 10][: 1 + (group + sample) % 3]
    mask = [True, True, False, False, True, True] if tool else [True] * len(tokens)
    return {
        "group": group,
        "sample": sample,
        "prompt_index": 19 - group,
        "epoch": 0,
        "prompt_ids": [1, 2, 3, 4, 3],
        "token_ids": tokens,
        "policy_mask": mask,
        "logprobs": [-0.5 if policy else 0.0 for policy in mask],
        "span_start": [0, 4] if tool else [0],
        "span_version": [max(0, group - 1)] * (2 if tool else 1),
        "span_worker": ["rollout-a-1-aa", "rollout-b-2-bb"] if tool else ["rollout-a-1-aa"],
        "span_digest": ["d00d", "d00d"] if tool else ["d00d"],
        "version": max(0, group - 1),
        "turns": 2 if tool else 1,
        "finish_reason": "error" if failed else ("length" if sample == 0 else "stop"),
        "status": "reward_timeout" if failed else "ok",
        "error": "the judge took more than 30 s" if failed else None,
        "reward": None if failed else (1.0 if group == 11 else min(1.0, group * 0.05 + sample * 0.1)),
        "reward_parts": json.dumps({"exact": 0.75, "format": 1.0}),
        "text": "answer four",
        "metadata": "{}",
        "started_at": START_US + group * 1_000_000,
        "finished_at": START_US + group * 1_000_000 + 500_000,
        "attempts": 3 if failed else 0,
        "commit_seq": group * SAMPLES + sample,
    }


def write_tables(root: Path) -> None:
    import lance

    experience = [experience_row(group, sample) for group in range(13) for sample in range(SAMPLES)]
    trained = [row for row in experience if row["group"] < 11]
    steps = [
        {"step": row["group"], "group": row["group"], "sample": row["sample"], "advantage": row["sample"] - 1.5,
         "staleness": row["group"] - row["version"], "tokens": len(row["token_ids"]), "mean_ratio": 1.0,
         "clip_fraction": 0.0, "policy_loss": 0.1, "mean_logprob": -0.5, "commit_seq": i}
        for i, row in enumerate(trained)
    ]  # fmt: skip
    metrics = [
        {"step": step, "version": step + 1, "digest": "d00d", "at": START_US + step * 20_000_000, "commit_seq": step,
         "metrics": json.dumps({"reward_mean": 0.1 + 0.05 * step, "response_length_mean": 12.0 + step % 3,
                                "response_length_max": 20.0, "staleness_mean": 1.0, "staleness_max": 2.0,
                                "entropy": None})}
        for step in range(STEPS_DONE)
    ]  # fmt: skip
    evaluation = [
        {"version": version, "mode": mode, "prompt_index": prompt, "sample": 0, "token_ids": [5, 6],
         "finish_reason": "stop", "status": "ok", "reward": 0.2 + 0.04 * version, "text": "four", "digest": "d00d",
         "at": START_US + version * 20_000_000, "commit_seq": version}
        for version in (0, 6, 12) for mode in ("greedy", "sample") for prompt in (0, 1)
    ]  # fmt: skip
    prompts = [
        {"prompt_index": i, "prompt": f"what is {i}", "answer": str(i), "environment": "", "metadata": "{}",
         "source": "t"}
        for i in range(20)
    ]  # fmt: skip
    for name, schema, rows in (
        ("experience", EXPERIENCE, experience),
        ("steps", STEPS, steps),
        ("step_metrics", STEP_METRICS, metrics),
        ("evaluation", EVALUATION, evaluation),
        ("prompts", PROMPTS, prompts),
    ):
        lance.write_dataset(pa.Table.from_pylist(rows, schema=schema), str(root / f"{name}.lance"))
    (root / "batches").mkdir()
    for step in range(STEPS_DONE):
        retired = {} if step < 11 else {11: "no_signal", 12: "error"}
        decision = BatchDecision(
            step=step, file="-", sha256="-", trained=[] if retired else [step], retired=retired, decided_by="trainer"
        )
        (root / "batches" / f"{step:09d}.json").write_text(decision.dump())


@dataclass(frozen=True)
class S3Service:
    """A real HTTP service on this machine that keeps its objects in memory (moto). `options`: for `open_storage`."""

    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        return {"endpoint_url": self.endpoint, "region": "us-east-1"}

    def bucket(self) -> str:
        """The URL of a new bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"), timeout=10).close()
        return f"s3://{name}"


@pytest.fixture(scope="session")
def s3_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = S3Service(f"http://127.0.0.1:{port}")
    with pytest.MonkeyPatch.context() as patch, (tmp_path_factory.mktemp("s3") / "log").open("wb") as output:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output
        )
        try:
            _wait_for(port, process)
            yield service
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, f"the S3 service ended with {process.returncode}"
        assert time.monotonic() < deadline, "the S3 service did not listen within 60 s"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
