"""`run.json`: what a run is. Written once by whoever creates the run, read by each worker that joins it."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from laminar.buffer.schema import FORMAT_VERSION
from laminar.buffer.storage import NotFound, Storage
from laminar.errors import ConfigError, FormatTooNew, StoreError

PATH = "run.json"


class Fingerprints(BaseModel):
    """sha256 of what may not change on resume."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    tokenizer: str
    template: str
    prompts: str
    held_out: str


class Change(BaseModel):
    """A config value that a resume changed, and the step at which it took effect."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    key: str
    before: Any
    after: Any
    step: int


class RunFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    format_version: int = FORMAT_VERSION
    run: str
    store_id: str = Field(default_factory=lambda: secrets.token_hex(8))
    """Random: tells a worker that it sees the same storage as the others."""
    generation: int = 1
    """Which life of the etcd state the run is in: raised by `laminar recover`, so that an older etcd is recognised."""
    created_at_us: int
    config: dict[str, Any]
    model_folder: str
    prompts: int
    held_out: int
    fingerprints: Fingerprints
    changes: list[Change] = []

    @property
    def config_digest(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()


async def read_run(storage: Storage) -> RunFile:
    """Raises FormatTooNew for a store of a newer format, StoreError if there is no run, or an unreadable one."""
    if not await storage.exists(PATH):
        raise NotFound(f"{storage.url} holds no run: there is no {PATH} in it; `laminar run CONFIG` creates one")
    data = await storage.read(PATH)
    try:
        version = _format_of(data)
        if version > FORMAT_VERSION:
            raise FormatTooNew(
                f"{storage.url} was written in store format {version}; this version of Laminar reads up to "
                f"{FORMAT_VERSION}: upgrade Laminar, or use another store root"
            )
        return RunFile.model_validate_json(data)
    except ValidationError as e:
        raise StoreError(f"{storage.url}/{PATH} is unreadable: {e}") from e


class _Format(BaseModel):
    model_config = ConfigDict(extra="ignore")
    format_version: int


def _format_of(data: bytes) -> int:
    return _Format.model_validate_json(data).format_version


async def write_run(storage: Storage, run: RunFile, *, overwrite: bool = False) -> None:
    await storage.write(PATH, run.model_dump_json(indent=2).encode(), overwrite=overwrite)


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """`{"run": {"seed": 0}}` as `{"run.seed": 0}`."""
    return {f"{s}.{k}": v for s, values in config.items() for k, v in values.items()}


def compare_for_resume(
    old: RunFile, config: dict[str, Any], fingerprints: Fingerprints, frozen: tuple[str, ...], step: int
) -> list[Change]:
    """The changes that a resume makes. Raises ConfigError naming both values of each that is not allowed."""
    refused = [
        f"{name}: the run has {before[:16]}…, this configuration gives {after[:16]}…"
        for name in Fingerprints.model_fields
        if (before := getattr(old.fingerprints, name)) != (after := getattr(fingerprints, name))
    ]
    before_config, after_config = flatten(old.config), flatten(config)
    changes: list[Change] = []
    for key in sorted(before_config.keys() | after_config.keys()):
        before, after = before_config.get(key), after_config.get(key)
        if before == after or key in ("run.store", "run.name"):
            continue
        if key in frozen:
            refused.append(f"{key}: the run has {before!r}, this configuration has {after!r}")
        elif key.split(".")[0] == "prompts":
            # What matters of the prompts is their fingerprint, compared above; these may be why it differs.
            if fingerprints.prompts != old.fingerprints.prompts or fingerprints.held_out != old.fingerprints.held_out:
                refused.append(f"{key}: the run has {before!r}, this configuration has {after!r}")
        else:
            changes.append(Change(key=key, before=before, after=after, step=step))
    if refused:
        raise ConfigError(
            f"run {old.run!r} cannot be resumed with a changed data set, model or frozen value:\n  "
            + "\n  ".join(refused)
            + "\nrestore them, or start another run (run.name)"
        )
    return changes
