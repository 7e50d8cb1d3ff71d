"""Starts what a rollout needs: engine, scoring processes, tokenizer, prompts. Checks that they fit together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from laminar.buffer.prompts import PromptPool
from laminar.buffer.storage import Storage
from laminar.workers.context import Run
from laminar.workers.engines.base import Engine, EngineCapacity
from laminar.workers.environments.host import EnvironmentHost
from laminar.workers.rollouts.conversation import Conversation, load_tokenizer, stop_token_ids


@dataclass(frozen=True)
class Equipment:
    """What a rollout needs beside its membership; it outlives a lost lease."""

    engine: Engine
    capacity: EngineCapacity
    host: EnvironmentHost
    conversation: Conversation
    pool: PromptPool
    held_out: PromptPool | None
    stop_token_ids: list[int]


async def equip(run: Run, engine: Engine) -> Equipment:
    """Raises ConfigError or EngineError naming what does not start."""
    config, folder = run.config, Path(run.file.model_folder)
    host = EnvironmentHost(config.environment, config.reward, workers=config.reward.workers)
    await host.start()
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        pool = await _open_pool(run.storage, "prompts")
        held_out = await _open_pool(run.storage, "held_out") if run.file.held_out else None
        capacity = await engine.start()
        return Equipment(
            engine=engine,
            capacity=capacity,
            host=host,
            conversation=Conversation(tokenizer, config.sampling.chat_template_options),
            pool=pool,
            held_out=held_out,
            stop_token_ids=stop_token_ids(folder, tokenizer),
        )
    except BaseException:
        await host.close()
        raise


async def _open_pool(storage: Storage, name: str) -> PromptPool:
    return await PromptPool.open(storage.absolute(f"{name}.lance"), storage_options=storage.table_options)
