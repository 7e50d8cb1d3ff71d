"""Names for network namespaces and interfaces that no other process uses, and the removal of those that dead ones left.

    lm 0002p 3k7q h1 ─── what the process adds: at most 4 characters, since an interface's name has at most 15
     │   │    └── when the process began, so that another one that got its number later is not taken for it
     │   └── the process
     └── all that this makes

The names of a process of another PID namespace look like a dead one's: share no network namespace with such.
"""

from __future__ import annotations

import os
import re
import string
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

NAMESPACES, INTERFACES = Path("/run/netns"), Path("/sys/class/net")
LONGEST = 15
"""Characters of an interface's name, by the kernel's limit."""
DIGITS = string.digits + string.ascii_lowercase
PID_DIGITS, BEGAN_DIGITS = 5, 4
BEGAN_RANGE = len(DIGITS) ** BEGAN_DIGITS
"""Beginnings are told apart modulo so many ticks, some hours: a number is not used again by chance that exactly."""
OWNED = re.compile(rf"lm([0-9a-z]{{{PID_DIGITS}}})([0-9a-z]{{{BEGAN_DIGITS}}})[0-9a-z]*")


class Owner(NamedTuple):
    """The process that made a name. `began`: in the kernel's ticks since it booted, modulo BEGAN_RANGE."""

    pid: int
    began: int


def own_name(what: str) -> str:
    """A name that only this process makes. Raises ValueError unless `what` is of few small letters and digits."""
    pid = os.getpid()
    began = began_at(pid)
    assert began is not None, "this process lives"
    name = f"lm{_digits(pid, PID_DIGITS)}{_digits(began, BEGAN_DIGITS)}{what}"
    if len(name) > LONGEST or owner_of(name) is None:
        room = LONGEST - len(name) + len(what)
        raise ValueError(f"{what!r} must be at most {room} small letters and digits to end an interface's name")
    return name


def owner_of(name: str) -> Owner | None:
    """None: the name is not of this making."""
    found = OWNED.fullmatch(name)
    return None if found is None else Owner(int(found[1], len(DIGITS)), int(found[2], len(DIGITS)))


def began_at(pid: int) -> int | None:
    """When the process began, as in Owner; None if it does not live, which one that is only not yet reaped does not."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in brackets, may hold anything.
    state, *fields = line[line.rindex(")") + 1 :].split()
    return None if state in "ZX" else int(fields[18]) % BEGAN_RANGE


def left_over(names: Iterable[str], began: Callable[[int], int | None] = began_at) -> list[str]:
    """Those of `names` whose process lives no more."""
    owners = ((name, owner_of(name)) for name in names)
    return [name for name, owner in owners if owner is not None and began(owner.pid) != owner.began]


def remove_left_over() -> list[str]:
    """Remove what processes that live no more have left on this host; its names. Needs root. Raises RuntimeError if
    something stays."""
    interfaces, namespaces = left_over(_entries(INTERFACES)), left_over(_entries(NAMESPACES))
    # Interfaces first: those that lie in a namespace go with the one that they are paired with.
    for name in interfaces:
        _remove(["ip", "link", "delete", name], INTERFACES / name)
    for name in namespaces:
        _remove(["ip", "netns", "delete", name], NAMESPACES / name)
    return [*interfaces, *namespaces]


def _remove(command: list[str], there: Path) -> None:
    """Another process may do the same at this moment."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and there.exists():
        raise RuntimeError(f"{' '.join(command)}, which a process that is dead has left: {done.stderr.strip()}")


def _entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def _digits(number: int, count: int) -> str:
    digits = ""
    for _ in range(count):
        number, digit = divmod(number, len(DIGITS))
        digits = DIGITS[digit] + digits
    return digits
