"""The environment of one turn: the prompt, one reply, the configured reward."""

from __future__ import annotations

import json
from collections.abc import Callable

from laminar.workers.environments.base import Message, Prompt, Resume, Score, Transcript, Turn


def spelled_messages(text: str) -> list[Message] | None:
    """The messages that a prompt's text spells as JSON; None if it is plain text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        parsed = json.loads(text)
    except ValueError:
        return None
    if (
        isinstance(parsed, list)
        and parsed
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in parsed)
    ):
        return parsed
    return None


def prompt_messages(prompt: Prompt) -> list[Message]:
    """The prompt's messages; plain text is one user message."""
    return spelled_messages(prompt.prompt) or [{"role": "user", "content": prompt.prompt}]


class SingleTurn:
    """Stateless; `score` is the configured reward."""

    resume: Resume = "state"

    def __init__(self, *, reward: Callable[[Prompt, Transcript], Score]) -> None:
        self._reward = reward

    def reset(self, prompt: Prompt) -> Turn:
        return Turn(prompt_messages(prompt))

    def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
        return Turn(state=state, done=True)

    def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        return self._reward(prompt, transcript)
