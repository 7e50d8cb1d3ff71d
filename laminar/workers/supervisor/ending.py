"""`end.json`: how the last `laminar run` of a run ended, for those who look at its store afterwards. It is there
exactly while no `laminar run` works on the run, unless one was killed."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from laminar.buffer.storage import Storage
from laminar.errors import StoreError

PATH = "end.json"


class Ending(BaseModel):
    """`state`: done (`max_steps`, or no prompt left), stopped (by a signal, to be resumed), failed. `at_us` is UTC."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    state: Literal["done", "stopped", "failed"]
    reason: str
    at_us: int


async def write_ending(storage: Storage, ending: Ending) -> None:
    """Raises StoreError."""
    await storage.write(PATH, ending.model_dump_json(indent=2).encode(), overwrite=True)


async def forget_ending(storage: Storage) -> None:
    """The run goes on."""
    await storage.delete(PATH)


async def read_ending(storage: Storage) -> Ending | None:
    """None if the last `laminar run` said nothing: it works, or was killed. Raises StoreError for an unreadable one."""
    try:
        return Ending.model_validate_json(await storage.read(PATH))
    except FileNotFoundError:
        return None
    except ValidationError as e:
        raise StoreError(f"{storage.url}/{PATH} is unreadable: {e}; remove it") from e
