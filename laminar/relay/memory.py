"""How much memory this host, and the containers around us, have, can still give, and have given to versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar.errors import ConfigError

INCOMING = 2
"""Arenas kept for what comes in: one being written while the one before is still being checked."""

SPARE = 1
"""Versions beside the retained ones that fit at least, for claims and slow readers."""


@dataclass(frozen=True)
class Scope:
    """The host, or a memory cgroup around us; bytes. `available`: can be allocated without swapping. `shared`: shared
    memory in it. All relays' versions are that, whoever still maps them, and so are files in a tmpfs."""

    name: str
    total: int
    available: int
    shared: int


def required_bytes(weights_bytes: int, *, retain: int, spare: int) -> int:
    """Memory of a relay: `retain` newest versions, two incoming and `spare` for versions that claims refer to."""
    return weights_bytes * (retain + INCOMING + spare)


def scopes(root: Path = Path("/")) -> list[Scope]:
    """The host first, then each cgroup (version 1 or 2) around us that limits memory. Raises ConfigError."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    if "MemAvailable" not in known:
        raise ConfigError("/proc/meminfo has no MemAvailable line: the relay needs Linux")
    # Pages set aside for hugetlbfs are no memory that an arena could have.
    total = known["MemTotal"] - known.get("Hugetlb", 0)
    host = Scope("this host", total, known["MemAvailable"], known.get("Shmem", 0))
    return [host, *(scope for scope in _cgroups(root) if scope.total <= total)]


def available_bytes(*, reserve: float = 0.0) -> int:
    """Bytes that can be allocated without swapping: the host's, or less if a memory cgroup is tighter. `reserve`: the
    share of each that is to stay free."""
    return min(scope.available - int(reserve * scope.total) for scope in scopes())


def check_memory(weights_bytes: int, *, retain: int, spare: int) -> None:
    """Raises ConfigError if the versions a relay must hold do not fit into what is free now."""
    required = required_bytes(weights_bytes, retain=retain, spare=spare)
    available = available_bytes()
    if required > available:
        raise ConfigError(
            f"the relay needs {gib(required)} ({retain} retained + {INCOMING} incoming + {spare} spare versions of "
            f"{gib(weights_bytes)}), but only {gib(available)} are available; lower relay.retain "
            f"(= {retain}), publish bfloat16, or give the host more memory"
        )


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


@dataclass(frozen=True)
class _Names:
    """Of a cgroup's files, and what its statistics put before those that count its children too."""

    limits: tuple[str, ...]
    used: str
    prefix: str


VERSION_1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
VERSION_2 = _Names(("memory.max", "memory.high"), "memory.current", "")


def _cgroups(root: Path) -> Iterator[Scope]:
    """Each enclosing cgroup with a limit; its reclaimable file cache counts as free."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if not controllers:
            top, names = root / "sys/fs/cgroup", VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", VERSION_1
        else:
            continue
        folder = top / path.lstrip("/")
        # Within a container its own cgroup is often mounted at the top, while its path is the host's.
        while folder.is_relative_to(top):
            scope = _cgroup(folder, names, "this container" if folder == top else f"the cgroup {folder.name}")
            if scope is not None:
                yield scope
            folder = folder.parent


def _cgroup(folder: Path, names: _Names, name: str) -> Scope | None:
    """None without a limit, or where there is no such cgroup."""
    found = []
    for limit in names.limits:
        try:
            text = (folder / limit).read_text().strip()
        except OSError:
            continue
        if text != "max":
            found.append(int(text))
    if not found:
        return None
    try:
        taken = int((folder / names.used).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    free = min(found) - taken + int(statistics.get(f"{names.prefix}inactive_file", "0"))
    shared = int(statistics.get(f"{names.prefix}shmem", "0"))
    return Scope(name, min(found), max(0, free), shared)
