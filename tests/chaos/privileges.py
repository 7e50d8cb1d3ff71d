"""What only some users and machines may do in a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOT_LET = ("not permitted", "denied", "not supported", "Unknown device type", "qdisc kind is unknown")


def privileged(command: list[str]) -> None:
    """Run it, or skip the test with the reason why this machine does not let us. Any other failure is one."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode == 0:
        return
    failed = f"{' '.join(command)}: {done.stderr.strip()}"
    if os.geteuid() == 0 and not any(reason in done.stderr for reason in NOT_LET):
        raise AssertionError(failed)
    pytest.skip(f"this machine does not let us: {failed}")


@contextmanager
def memory_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory of its own, of this size (`170m`), at `folder`, which is made."""
    folder.mkdir()
    privileged(["mount", "-t", "tmpfs", "-o", f"size={size}", "laminar-test", str(folder)])
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
