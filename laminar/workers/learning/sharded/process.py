"""A rank process: does what the leading learner says, and ends when that ends, however it does."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from laminar.config import TrainerConfig
from laminar.errors import LaminarError
from laminar.relay.writing import Invitation
from laminar.workers.learning.sharded.learner import ShardedLearner
from laminar.workers.learning.sharded.wire import read_frame, unpack_samples, write_frame

log = logging.getLogger(__name__)

Call = tuple[dict[str, Any], bytes]


def start(setup: dict[str, Any]) -> ShardedLearner:
    return ShardedLearner(
        Path(setup["model_folder"]),
        TrainerConfig.model_validate(setup["trainer"]),
        temperature=setup["temperature"],
        dtype=setup["dtype"],
        rank=setup["rank"],
        ranks=setup["ranks"],
        meeting=Path(setup["meeting"]),
    )


def carry_out(learner: ShardedLearner, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """The answer. Raises LaminarError for what the leader refuses as well."""
    match message["call"]:
        case "accumulate":
            tally = learner.accumulate(unpack_samples(payload), message["version"])
            return {"rows": {index: list(vars(row).values()) for index, row in tally.rows.items()}}
        case "compare":
            learner.compare(unpack_samples(payload))
        case "update":
            learner.update()
        case "configure":
            learner.configure(message["settings"])
        case "stage":
            learner.stage()
        case "write_part":
            learner.write_part(Invitation(**message["invitation"]))
        case "gather":
            learner.gather()
        case "gather_published":
            learner.gather_published()
        case "load":
            learner.load(Path(message["folder"]))
        case "export":
            learner.export(Path(message["folder"]))
        case unknown:
            raise AssertionError(f"the leader asked for {unknown!r}")
    return {}


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """(calls, answers) as private descriptors; what libraries print goes to stderr."""
    calls = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return calls, answers


def _read(stream: BinaryIO, calls: queue.SimpleQueue[Call]) -> None:
    while (call := read_frame(stream)) is not None:
        calls.put(call)
    # The leader is gone, and this process may be waiting for it in a collective.
    os._exit(0)


def main() -> None:
    # The trainer stops by itself, and its ranks with it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    stream, answers = _take_streams()
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(stream, calls), name="calls", daemon=True).start()
    setup, _ = calls.get()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"rank {setup['rank']}: %(message)s")
    learner = start(setup)
    write_frame(answers, {})
    while True:
        message, payload = calls.get()
        try:
            answer = carry_out(learner, message, payload)
        except LaminarError as e:
            answer = {"refused": str(e)}
        write_frame(answers, answer)


if __name__ == "__main__":
    main()
