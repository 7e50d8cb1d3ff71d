"""How much memory this host, or the container around us, can still give."""

from __future__ import annotations

from pathlib import Path

from laminar.errors import ConfigError

INCOMING = 2
"""Arenas kept for what comes in: one being written while the one before is still being checked."""

SPARE = 1
"""Versions beside the retained ones that fit, for claims and slow readers."""


def required_bytes(weights_bytes: int, *, retain: int, spare: int) -> int:
    """Memory of a relay: `retain` newest versions, two incoming and `spare` for versions that claims refer to."""
    return weights_bytes * (retain + INCOMING + spare)


def available_bytes() -> int:
    """Bytes that can be allocated without swapping: the host's, or less if a memory cgroup is tighter."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_cgroup_room()])
    raise ConfigError("/proc/meminfo has no MemAvailable line: the relay needs Linux")


def check_memory(weights_bytes: int, *, retain: int, spare: int) -> None:
    """Raises ConfigError if the versions a relay must hold do not fit into what is free now."""
    required = required_bytes(weights_bytes, retain=retain, spare=spare)
    available = available_bytes()
    if required > available:
        raise ConfigError(
            f"the relay needs {_gib(required)} ({retain} retained + {INCOMING} incoming + {spare} spare versions of "
            f"{_gib(weights_bytes)}), but only {_gib(available)} are available; lower relay.retain "
            f"(= {retain}), publish bfloat16, or give the host more memory"
        )


def _cgroup_room() -> list[int]:
    """What each enclosing cgroup (version 2) still allows; its reclaimable file cache counts as free."""
    rooms = []
    try:
        entry = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return []
    folder = Path("/sys/fs/cgroup") / entry[3:].lstrip("/")
    while folder.is_relative_to("/sys/fs/cgroup"):
        try:
            limit = (folder / "memory.max").read_text().strip()
            current = int((folder / "memory.current").read_text())
            statistics = dict(x.split() for x in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            limit = "max"
        if limit != "max":
            rooms.append(max(0, int(limit) - current + int(statistics.get("inactive_file", "0"))))
        folder = folder.parent
    return rooms


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
