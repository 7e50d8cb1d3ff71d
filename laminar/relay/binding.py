"""Where the relay's Unix socket lies: in a folder that only this user can enter, and only one relay at each."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from laminar.errors import ConfigError
from laminar.relay.accepting import BACKLOG

ELSEWHERE = (
    "start the relay with XDG_RUNTIME_DIR set to a folder of your own, short and on a local disk: "
    "mkdir -pm 700 ~/.laminar; export XDG_RUNTIME_DIR=~/.laminar"
)
"""What helps where a folder cannot be had: its name begins with that variable's, else with the temporary folder's."""


def make_private(folder: Path) -> None:
    """Make `folder` if it is not there. Raises ConfigError, with what helps, unless it is this user's alone then."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as e:
        raise ConfigError(f"the relay's folder {folder} cannot be made: {e.strerror}; {ELSEWHERE}") from e
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"the relay's folder {folder} belongs to user {found.st_uid}, not to user {os.getuid()}, and only that one "
            f"can give it up; {ELSEWHERE}"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(f"the relay's folder {folder} has mode {mode:o}, others can enter it: chmod 700 {folder}")


def bind(path: Path) -> socket.socket:
    """A listening socket of mode 0600. Raises ConfigError if others can enter its folder or a relay serves there."""
    make_private(path.parent)
    if path.is_symlink() or path.exists():
        _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(f"cannot bind the relay's socket {path}: {e.strerror}") from e
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    # A regular file refuses connections just as a dead socket does.
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{path} exists and is not a relay's socket; remove it or use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as e:
            raise ConfigError(f"{path} cannot be tried ({e.strerror}); remove it if no relay runs") from e
    raise ConfigError(f"a relay serves at {path} already; stop it or use another path")
