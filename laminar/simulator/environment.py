"""Simulated scoring processes and tokenizer: rewards that take their time, hang until their limit, or raise."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence

from laminar.errors import EnvironmentFailure
from laminar.workers.environments.base import Message, Prompt, Resume, Score, Transcript, Turn

ENVIRONMENT_TOKEN, FIRST_REPLY = 1, 100
REWARD_LIMIT_S = 2.0


def tokens_of_reply(turn: int) -> list[int]:
    """The environment's reply to turn `turn`, counted from 1: none of its tokens is one of the policy's."""
    return [ENVIRONMENT_TOKEN, FIRST_REPLY + turn]


class SimHost:
    """Probabilities of one call: `hanging` runs into the limit, `raising` fails at once."""

    resume: Resume = "state"

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.hanging = 0.0
        self.raising = 0.0

    async def reset(self, prompt: Prompt) -> Turn:
        await self._call("environment")
        return Turn([{"role": "user", "content": prompt.prompt}], state="0")

    async def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
        await self._call("environment")
        done = hashlib.sha256(reply.encode()).digest()[0] < 128
        turn = int(state) + 1
        return Turn([{"role": "tool", "content": str(turn)}], state=str(turn), done=done)

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        await self._call("reward")
        reward = float(hashlib.sha256(f"{prompt.prompt}{transcript.replies}".encode()).digest()[0] % 2)
        return Score(reward, {"right": reward})

    async def close(self) -> None:
        pass

    async def _call(self, kind: str) -> None:
        chance = self.source.random()
        if chance < self.hanging:
            await asyncio.sleep(REWARD_LIMIT_S)
            raise EnvironmentFailure(f"{kind}_timeout", f"it took more than {REWARD_LIMIT_S} s")
        await asyncio.sleep(self.source.uniform(0.001, 0.05))
        if chance < self.hanging + self.raising:
            raise EnvironmentFailure(f"{kind}_error", "user code raised")


class SimConversation:
    """A tokenizer of lengths: of what a text says, only a reply's number matters."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return [ENVIRONMENT_TOKEN] * (2 + sum(len(m["content"]) for m in messages) % 7)

    def turn_ids(self, messages: Sequence[Message], reply_ids: Sequence[int] | None = None) -> list[int]:
        return tokens_of_reply(int(messages[-1]["content"]))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)
