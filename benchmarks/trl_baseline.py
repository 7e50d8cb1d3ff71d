"""TRL's GRPOTrainer on the quick-start's task: what `end_to_end.py` compares Laminar with.

Runs in a virtual environment of its own and imports nothing of Laminar: model, prompts and settings come in one
JSON file, events go out as JSON lines (`began` at the start of the first step, then `step` after each optimizer step).

    .venv-trl/bin/python benchmarks/trl_baseline.py task.json events.jsonl

The task file: {"model": folder, "prompts": [{"messages", "dataset", "options", "entry"}] in the order of drawing,
"groups_per_step", "samples_per_prompt", "max_tokens", "temperature", "learning_rates" (one a step), "betas",
"weight_decay", "max_grad_norm", "clip_low", "clip_high", "max_steps", "stop_at" (or null), "precision", "seed"}.

precision   "autocast": float32 weights, bfloat16 compute (TRL's own `bf16=True`; the learner of Laminar does the same)
            "bfloat16": weights, optimizer and compute in bfloat16: faster, with updates that rounding may swallow
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import reasoning_gym
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WINDOW = 5
INTEGER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*")
"""The integers in a reply; Laminar's reward `last_integer` finds the same."""


class Reporter(TrainerCallback):
    """Writes the events, and ends the run once the mean reward of the last five steps has reached `stop_at`."""

    def __init__(self, events: TextIO, stop_at: float | None) -> None:
        self.events = events
        self.stop_at = stop_at
        self.rewards: list[float] = []
        self.ended = 0.0

    def say(self, **event: Any) -> None:
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.say(event="began", at=time.time())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "reward" not in logs:
            return
        self.rewards.append(logs["reward"])
        self.say(
            event="step",
            step=state.global_step - 1,
            at=self.ended,
            reward=logs["reward"],
            length=logs.get("completions/mean_length"),
        )
        recent = self.rewards[-WINDOW:]
        if self.stop_at is not None and len(recent) == WINDOW and sum(recent) / WINDOW >= self.stop_at:
            control.should_training_stop = True


def scorer(prompts: list[dict[str, Any]]) -> Callable[..., list[float]]:
    """The reward of Laminar's quick-start: the data set's own score of the last integer in the reply."""
    first = prompts[0]
    dataset = reasoning_gym.create_dataset(first["dataset"], size=1, seed=0, **first["options"])

    def reward(completions: list[Any], place: list[int], **kwargs: Any) -> list[float]:
        rewards = []
        for completion, i in zip(completions, place, strict=True):
            found = INTEGER.findall(completion[0]["content"])
            rewards.append(float(dataset.score_answer(found[-1], prompts[i]["entry"])) if found else 0.0)
        return rewards

    return reward


def settings(task: dict[str, Any], folder: str) -> GRPOConfig:
    batch = task["groups_per_step"] * task["samples_per_prompt"]
    dtype = "float32" if task["precision"] == "autocast" else "bfloat16"
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": dtype},
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_generations=task["samples_per_prompt"],
        max_completion_length=task["max_tokens"],
        temperature=task["temperature"],
        learning_rate=max(task["learning_rates"]),
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        weight_decay=task["weight_decay"],
        max_grad_norm=task["max_grad_norm"],
        epsilon=task["clip_low"],
        epsilon_high=task["clip_high"],
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        max_steps=task["max_steps"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=task["seed"],
        gradient_checkpointing=False,
        disable_tqdm=True,
        shuffle_dataset=False,
    )


class Trainer(GRPOTrainer):
    """GRPOTrainer with the learning rates that are given, one a step."""

    def __init__(self, rates: list[float], **kwargs: Any) -> None:
        self.rates = rates
        super().__init__(**kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        peak, last = max(self.rates), len(self.rates) - 1
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: self.rates[min(step, last)] / peak)
        return self.lr_scheduler


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(f"usage: {sys.argv[0]} TASK.json EVENTS.jsonl")
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    prompts = task["prompts"]
    needed = task["groups_per_step"] * task["max_steps"]
    if len(prompts) < needed:
        raise SystemExit(f"{len(prompts)} prompts are given, {task['max_steps']} steps need {needed}")
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    tokenizer.padding_side = "left"
    rows = Dataset.from_list([{"prompt": p["messages"], "place": i} for i, p in enumerate(prompts)])
    with tempfile.TemporaryDirectory() as folder, open(sys.argv[2], "w", encoding="utf-8") as events:
        reporter = Reporter(events, task["stop_at"])
        trainer = Trainer(
            task["learning_rates"],
            model=task["model"],
            reward_funcs=scorer(prompts),
            args=settings(task, folder),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[reporter],
        )
        trainer.train()


if __name__ == "__main__":
    main()
