"""What travels between a host and its scoring processes: JSON objects, one a line, no pickle.

    host                                   scoring process
    {environment, reward, parent}   ->
                                    <-     {ready, resume} | {failed}
    {call, prompt, …}               ->
                                    <-     {result} | {status, message}

One request is under way in a process at a time, so that answers need no number: a process whose request was given up
is killed, never asked again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from laminar.workers.environments.base import Prompt, Score, Transcript, Turn

LINE_LIMIT = 64 * 1024 * 1024
"""Bytes of a line at most: a longer answer of an environment is an error of that environment."""
MESSAGE_LIMIT = 500
"""Characters of an error's message at most: it becomes a column of the experience."""

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?$", re.IGNORECASE)
_SECRET_LENGTH = 8


def encode(message: Mapping[str, Any]) -> bytes:
    """One line. Raises TypeError or ValueError for what JSON cannot say."""
    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a line holds {type(message).__name__}, not an object")
    return message


def prompt_from(data: Mapping[str, Any]) -> Prompt:
    return Prompt(**data)


def transcript_from(data: Mapping[str, Any]) -> Transcript:
    return Transcript(**data)


def turn_from(data: Mapping[str, Any]) -> Turn:
    return Turn(**data)


def score_from(data: Mapping[str, Any]) -> Score:
    return Score(**data)


def plain(value: Prompt | Transcript | Turn | Score) -> dict[str, Any]:
    """A dataclass of this room as the JSON object that the functions above read."""
    return asdict(value)


def checked_turn(value: object) -> Turn:
    """What `reset` or `step` of a user's environment returned. Raises TypeError or ValueError naming what is wrong."""
    if not isinstance(value, Turn):
        raise TypeError(f"returned {type(value).__name__}, expected a Turn")
    if not isinstance(value.state, str):
        raise TypeError(f"Turn.state is {type(value.state).__name__}, expected a string (json.dumps it)")
    for message in value.messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise TypeError(f"Turn.messages holds {message!r:.80}, expected an object with `role` and `content`")
    # Lone surrogates pass through JSON, but neither tokenizers nor tables take them.
    json.dumps([value.messages, value.state], ensure_ascii=False).encode("utf-8")
    return value


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the values of environment variables whose names say that they are secret."""
    for name, value in (os.environ if environ is None else environ).items():
        if len(value) >= _SECRET_LENGTH and _SECRET_NAME.search(name):
            text = text.replace(value, f"[{name}]")
    return text


def shortened(text: str) -> str:
    """At most MESSAGE_LIMIT characters that are valid UTF-8."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"
