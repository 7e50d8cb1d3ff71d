"""A mark in `runs/<name>` that says where a run's store is, if it is not that folder: so a run is found by its name."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from laminar.errors import StoreError

MARK = "store.json"


class StoreMark(BaseModel):
    """`options`: the section `storage` of the run's config. Keys of the storage are not among them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    store: str
    options: dict[str, str]


def write_mark(folder: Path, store: str, options: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = StoreMark(store=store, options=options).model_dump_json(indent=2)
    (folder / MARK).write_text(text, encoding="utf-8")


def read_mark(folder: Path) -> StoreMark | None:
    """None if the folder has none. Raises StoreError for one that is unreadable."""
    path = folder / MARK
    if not path.is_file():
        return None
    try:
        return StoreMark.model_validate_json(path.read_bytes())
    except ValidationError as e:
        raise StoreError(f"{path} is unreadable: {e}; remove it and name the store by its URL") from e
