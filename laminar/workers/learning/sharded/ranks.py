"""The other ranks' processes, as the leader has them: each is told the same, and answers when it is done.

A rank that dies takes the trainer with it: what it held of the weights is gone, and the others may be waiting for it in
a collective that nothing ends. So the call under way fails with RankLost, and if the leader itself is stuck in it, its
process ends.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from laminar.errors import LaminarError
from laminar.workers.learning.sharded.wire import read_frame, write_frame

log = logging.getLogger(__name__)

START_S = 600.0
"""In which each rank must have loaded its part of the model."""
ANSWER_S = 600.0
"""That a rank may take longer than the leader for what both do."""
STUCK_S = 20.0
"""That the leader's own part of a call may last once a rank has died; a collective of NCCL may never end."""
LEAVE_S = 5.0


class RankLost(RuntimeError):
    """Not a LaminarError: no decided batch is to blame, and a trainer that is started again can train it."""


class Ranks:
    """Processes of the ranks 1 and up. `call` from one thread at a time."""

    def __init__(self, setup: Mapping[str, Any], ranks: int) -> None:
        self._busy = threading.Lock()
        self._closed = False
        self._apart = False
        self._others = [_Rank(rank, self._lost) for rank in range(1, ranks)]
        try:
            for other in self._others:
                other.send({**setup, "call": "start", "rank": other.rank, "ranks": ranks})
        except BaseException:
            self.close()
            raise

    def started(self) -> None:
        """Wait until all have loaded the model. Raises RankLost."""
        for other in self._others:
            other.answer(START_S)

    @contextmanager
    def together(
        self, call: str, payload: bytes | pa.Buffer = b"", *, refused: type[Exception] | None = None, **values: Any
    ) -> Iterator[list[dict[str, Any]]]:
        """Have all ranks do `call` while the block does the leader's part; the list has their answers at its end.
        Raises RankLost if one dies, `refused` (RankLost) if one refuses what the leader did; else what the block
        raises."""
        answers: list[dict[str, Any]] = []
        with self._busy:
            if self._apart:
                raise RankLost("a call before ended in the middle: the ranks of the trainer are no longer together")
            self._apart = True
            for other in self._others:
                other.send({"call": call, **values}, payload)
            try:
                yield answers
            except (LaminarError, OSError):
                # What the leader refuses or cannot write is outside of collectives: the others get to the end.
                self._collect()
                raise
            except RuntimeError as e:
                # Of a collective whose other side is gone, perhaps.
                for other in self._others:
                    other.check_alive(within=LEAVE_S, cause=e)
                raise
            answers += self._collect()
        for other, answer in zip(self._others, answers, strict=True):
            if "refused" in answer:
                raise (refused or RankLost)(f"rank {other.rank} of the trainer: {answer['refused']}")

    def _collect(self) -> list[dict[str, Any]]:
        answers = [other.answer(ANSWER_S) for other in self._others]
        self._apart = False
        return answers

    def close(self) -> None:
        self._closed = True
        for other in self._others:
            other.close()

    def _lost(self, rank: _Rank) -> None:
        """In the thread that reads the rank's answers, at their end."""
        if self._closed:
            return
        log.error("%s: this trainer ends, and goes on from the store when it is started again", rank.how_it_ended())
        if not self._busy.acquire(timeout=STUCK_S):
            log.critical("rank 0 still waits for it after %.0f s: ending this process", STUCK_S)
            os._exit(1)
        self._busy.release()


class _Rank:
    """One process and its pipes."""

    def __init__(self, rank: int, lost: Callable[[_Rank], None]) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            [sys.executable, "-m", "laminar.workers.learning.sharded.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._read, args=(lost,), name=f"rank-{rank}", daemon=True).start()

    def send(self, message: Mapping[str, Any], payload: bytes | pa.Buffer = b"") -> None:
        try:
            write_frame(self._process.stdin, message, payload)  # type: ignore[arg-type]
        except OSError as e:
            raise RankLost(self.how_it_ended()) from e

    def answer(self, limit_s: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            late = f"rank {self.rank} of the trainer (process {self._process.pid}) did not answer in {limit_s:.0f} s"
            raise RankLost(late) from None
        if answer is None:
            raise RankLost(self.how_it_ended())
        return answer

    def check_alive(self, *, within: float, cause: BaseException) -> None:
        if self._ended.wait(within):
            raise RankLost(self.how_it_ended()) from cause

    def how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_S)
        code = self._process.returncode
        how = f"with exit code {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        return f"rank {self.rank} of the trainer (process {self._process.pid}) ended {how}"

    def close(self) -> None:
        """It ends when its pipe does."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, lost: Callable[[_Rank], None]) -> None:
        while (frame := read_frame(self._process.stdout)) is not None:  # type: ignore[arg-type]
            self._answers.put(frame[0])
        self._ended.set()
        self._answers.put(None)
        lost(self)
