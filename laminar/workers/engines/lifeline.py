"""The engine's process ends with the rollout's, however that ends, from its first moment on.

vLLM has the engine process wait five minutes for a rollout that was killed while it started, and has no check at
all of a rollout's death later than that. This module is what the engine process imports first; it imports nothing
but the standard library.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PARENT_VARIABLE = "LAMINAR_ENGINE_PARENT"
"""Environment variable with the process id of the rollout: it must be known before any message can arrive."""

MOST_PARENT = 48
"""Bytes of the path in which the folder of sockets lies: a socket's own may have 107 bytes, of which the folder's name
takes 22 and vLLM's name for it 37."""


def die_with(parent: int) -> None:
    """End this process as soon as process `parent` is gone.

    Not PR_SET_PDEATHSIG: that follows the parent's *thread*, and vLLM is started from a thread of a pool.
    """
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-rollout", daemon=True).start()


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What the engine process runs: vLLM's own entry. Named here so that this module is imported first."""
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core(*args, **kwargs)


@contextmanager
def engine_processes_tied_to_this_one() -> Iterator[None]:
    """Engine processes that vLLM spawns inside the block enter through `run_engine_core`."""
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.__dict__["run_engine_core"]
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = original


@contextmanager
def sockets_of_this_one() -> Iterator[None]:
    """vLLM's sockets, which a process that is killed leaves, in a folder that goes with this process or, if that is
    killed, when the next one begins here."""
    from laminar.workers.scratch import scratch

    usual = tempfile.gettempdir()
    with scratch(Path(usual if len(os.fsencode(usual)) <= MOST_PARENT else "/tmp"), "laminar-vllm-") as folder:
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
        yield


def kill_left(pids: Iterable[int]) -> None:
    """SIGKILL to those that still run."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("engine process %d has ended", pid)
        finally:
            os.close(handle)


_parent = int(os.environ.get(PARENT_VARIABLE, "0"))
if _parent and _parent != os.getpid():
    die_with(_parent)
