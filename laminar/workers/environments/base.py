"""What the policy acts in. Environments are stateless: their state is a string that the store keeps.

An implementation is named `module:name` in the config, is created in a scoring process with the config's
options as keyword arguments, and runs there under a time limit (`host.py`). It may block, raise, or loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = dict[str, Any]
"""A chat message: `role` and `content` at least, as chat templates take it."""
Resume = Literal["state", "replay", "restart"]


@dataclass(frozen=True)
class Prompt:
    prompt_index: int
    prompt: str
    """Text, or a JSON list of messages."""
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What the environment says next: `messages` go to the policy, unless `done`."""

    messages: list[Message] = field(default_factory=list)
    state: str = ""
    done: bool = False


@dataclass(frozen=True)
class Transcript:
    """A finished trajectory as the reward sees it: what was said, and how it ended."""

    replies: list[str]
    """The policy's decoded turns, special tokens removed."""
    messages: list[Message]
    """The whole conversation, the first prompt included."""
    finish_reason: str
    state: str = ""
    tokens: int = 0


@dataclass(frozen=True)
class Score:
    """`reward` is the weighted total; `parts` the unweighted ones by name. `parts` may be empty."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    resume: Resume
    """How an unfinished trajectory goes on after its owner died between two turns: from the stored state,
    by replaying the replies through `step`, or from the first prompt again."""

    def reset(self, prompt: Prompt) -> Turn:
        """The first messages (usually system and user) and the first state."""
        ...

    def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
        """React to the policy's reply. A single-turn environment returns `Turn(done=True)`."""
        ...

    def score(self, prompt: Prompt, transcript: Transcript) -> Score | Sequence[float]: ...
