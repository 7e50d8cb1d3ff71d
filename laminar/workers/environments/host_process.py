"""A scoring process: holds one environment, answers one request at a time. `host.py` starts it.

User code runs in the main thread, so that it may use `signal.alarm`. Its prints go to stderr: the stream of answers is
a descriptor of its own. The process ends with its host, however that died.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from laminar.errors import ConfigError
from laminar.workers.environments import wire
from laminar.workers.environments.base import Environment, Prompt, Score, Transcript
from laminar.workers.environments.calculator import Calculator
from laminar.workers.environments.rewards import NoResult, build_reward, is_unreachable, last_line, load_object, total
from laminar.workers.environments.single_turn import SingleTurn

_BUILT_IN: dict[str, Callable[..., Environment]] = {"single-turn": SingleTurn, "calculator": Calculator}
_RESUMES = ("state", "replay", "restart")
_PR_SET_PDEATHSIG = 1


def build_environment(environment: Mapping[str, Any], reward: Mapping[str, Any]) -> Environment:
    """The configured environment. It is given the configured reward if it has a parameter `reward`.

    Raises ConfigError naming the object, with the last line of what creating it raised."""
    name, options = environment["name"], dict(environment["options"])
    factory = _BUILT_IN.get(name) or load_object(name, what="environment.name =")
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment.name = {name!r} is not a class or function: {error}") from error
    if "reward" in parameters and "reward" not in options:
        options["reward"] = build_reward(reward["name"], reward["options"], timeout=reward["timeout"])
    try:
        made: Environment = factory(**options)
    except ConfigError:
        raise
    except BaseException as error:  # a user's constructor may raise anything
        raise ConfigError(f"environment.name = {name!r} cannot be created: {last_line(error)}") from error
    missing = [method for method in ("reset", "step", "score") if not callable(getattr(made, method, None))]
    if missing or getattr(made, "resume", None) not in _RESUMES:
        wanted = ", ".join(missing) or f"a `resume` of {', '.join(map(repr, _RESUMES))}"
        raise ConfigError(f"environment.name = {name!r} lacks {wanted}; see Environment in environments/base.py")
    return made


def answer(environment: Environment, request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out one request. What user code raises becomes a status, never the end of this process."""
    call = request["call"]
    kind = "reward" if call == "score" else "environment"
    try:
        return {"result": wire.plain(_carry_out(environment, call, request))}
    except TimeoutError as error:
        return _failed(f"{kind}_timeout", error)
    except BaseException as error:  # the border to user code; SystemExit and alarms are among what it raises
        if kind == "reward" and is_unreachable(error):
            return _failed("reward_no_result", error)
        return _failed(f"{kind}_error", error)
    finally:
        # An alarm that the call left behind would hit the next one.
        signal.setitimer(signal.ITIMER_REAL, 0)


def _carry_out(environment: Environment, call: str, request: Mapping[str, Any]) -> Any:
    prompt: Prompt = wire.prompt_from(request["prompt"])
    if call == "reset":
        return wire.checked_turn(environment.reset(prompt))
    if call == "step":
        return wire.checked_turn(environment.step(prompt, request["state"], request["reply"]))
    transcript: Transcript = wire.transcript_from(request["transcript"])
    score: Score = total(environment.score(prompt, transcript))
    return score


def _failed(status: str, error: BaseException) -> dict[str, Any]:
    message = str(error) if isinstance(error, NoResult) else f"{last_line(error)}{_place(error)}"
    return {"status": status, "message": wire.shortened(wire.redacted(message))}


def _place(error: BaseException) -> str:
    """Where it was raised, as ` (file:line)`; empty if only this package's frames are known."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if os.path.dirname(os.path.abspath(name)) != os.path.dirname(os.path.abspath(__file__)):
            place = f" ({os.path.basename(name)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


class _Requests:
    """Requests of the host, read in a thread of their own so that the end of the host is seen during a call."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._busy = False
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            with self._lock:
                self._busy = True
            self._queue.put(wire.decode(line))
        with self._lock:
            if self._busy:
                os.killpg(0, signal.SIGKILL)
        self._queue.put(None)

    def next(self) -> dict[str, Any] | None:
        return self._queue.get()

    def answered(self) -> None:
        with self._lock:
            self._busy = False


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers) as private descriptors; user code finds an empty stdin, and stderr as its stdout."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def _die_with(parent: int) -> None:
    """SIGKILL for this process when its host ends: no call outlives it, even if it never lets go of the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _send(stream: BinaryIO, message: Mapping[str, Any], status: str) -> None:
    """Write all of one line; what JSON cannot say, or what is too long, becomes an error of `status`."""
    try:
        line = wire.encode(message)
        if len(line) > wire.LINE_LIMIT:
            raise ValueError(f"the answer has {len(line)} bytes, the limit is {wire.LINE_LIMIT}")
    except (TypeError, ValueError) as error:
        line = wire.encode({"status": status, "message": f"the answer cannot be sent: {last_line(error)}"})
    view = memoryview(line)
    while view:
        view = view[stream.write(view) :]


def main() -> int:
    requests_stream, answers = _take_streams()
    first = wire.decode(requests_stream.readline())
    _die_with(first["parent"])
    try:
        environment = build_environment(first["environment"], first["reward"])
    except ConfigError as error:
        _send(answers, {"failed": wire.redacted(str(error))}, "environment_error")
        return 2
    _send(answers, {"ready": True, "resume": environment.resume}, "environment_error")
    requests = _Requests(requests_stream)
    while (request := requests.next()) is not None:
        result = answer(environment, request)
        requests.answered()
        _send(answers, result, "reward_error" if request["call"] == "score" else "environment_error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
