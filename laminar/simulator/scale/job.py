"""A job as the simulator sees it: settings with everything that follows from them, and who gets which GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from laminar.errors import ConfigError
from laminar.simulator.scale.costs import RELOAD_S, Costs, Decode, Fitted, Train, Weights, fitted, published_costs
from laminar.simulator.scale.engine import Engine, Key, Request
from laminar.simulator.scale.lengths import Lengths, read_trace
from laminar.simulator.scale.published import GPUS, MASTER_BYTES_PER_S, MODELS
from laminar.simulator.scale.settings import MEASURED, CostsSection, Settings
from laminar.workers.draining import MAX_KV_SHARE

MEASURED_BYTES = 1e9
"""Of a version, where nothing says how large it is."""


@dataclass(frozen=True)
class Job:
    settings: Settings
    costs: Costs
    lengths: Lengths

    @classmethod
    def of(cls, settings: Settings) -> Job:
        """Raises ConfigError where the model does not fit, GPUs cannot share it, or a trace cannot be read."""
        job, lengths = settings.job, settings.lengths
        costs = costs_of(settings)
        _check_size(settings, costs.tensor_parallel)
        longest = job.prompt_tokens + job.max_tokens
        if costs.kv_tokens < longest / MAX_KV_SHARE:
            raise ConfigError(
                f"the KV cache of a rollout has room for {costs.kv_tokens} tokens, a trajectory may have {longest} "
                "(job.prompt_tokens + job.max_tokens): raise model.tensor_parallel, or lower job.max_tokens"
            )
        if settings.cluster.gpus < costs.tensor_parallel:
            raise ConfigError(
                f"cluster.gpus = {settings.cluster.gpus}, one rollout takes {costs.tensor_parallel}; raise cluster.gpus"
            )
        recorded = read_trace(Path(lengths.trace), lengths.column) if lengths.trace else None
        drawn = Lengths(
            samples=job.samples_per_prompt, longest=job.max_tokens, seed=job.seed, median=lengths.median,
            sigma=lengths.sigma, recorded=recorded,
        )  # fmt: skip
        return cls(settings, costs, drawn)

    # -- trajectories -------------------------------------------------------------------------------------------

    @cached_property
    def samples(self) -> int:
        return self.settings.job.samples_per_prompt

    @cached_property
    def turns(self) -> int:
        return self.settings.environment.turns

    @cached_property
    def prompt_tokens(self) -> int:
        return self.settings.job.prompt_tokens

    def turns_of(self, key: Key) -> list[int]:
        """Policy tokens of each turn of a trajectory; a short one has fewer turns."""
        length, turns = self.lengths.of(*key), self.turns
        if turns == 1:
            return [length]
        edges = np.linspace(0, length, min(turns, length) + 1).round().astype(int)
        return [int(n) for n in np.diff(edges)]

    def acting_s(self, key: Key, turn: int) -> float:
        """Seconds of the environment after a turn."""
        environment = self.settings.environment
        if not environment.median_s:
            return 0.0
        source = np.random.default_rng([self.settings.job.seed, *key, turn])
        return float(source.lognormal(np.log(environment.median_s), environment.sigma))

    def first(self, key: Key) -> Request:
        """Its first turn. The prompt's computation is shared by the group."""
        prompt = self.prompt_tokens
        return Request(key, prompt, self.turns_of(key)[0], prompt / self.samples)

    def engine(self) -> Engine:
        return Engine(
            self.costs.decode, int(MAX_KV_SHARE * self.costs.kv_tokens), self.settings.rollout.max_running,
            self.costs.prefill_tokens_per_s,
        )  # fmt: skip

    @cached_property
    def context(self) -> float:
        return self.lengths.context(self.settings.job.prompt_tokens)

    @cached_property
    def batch_limit(self) -> int:
        return self.costs.decode.batch_limit(self.context, self.settings.rollout.max_running)

    # -- training -----------------------------------------------------------------------------------------------

    def train_s(self, groups: Iterable[int], gpus: int, mini_batches: int | None = None) -> float:
        tokens = self.settings.job.prompt_tokens + self.lengths.of_groups(groups).ravel()
        return self.costs.train.step_s(tokens, gpus, mini_batches or self.settings.job.mini_batches)


def _check_size(settings: Settings, size: int) -> None:
    """Raises ConfigError where `size` GPUs cannot be one rollout, or leave some of a machine without work."""
    cluster, name = settings.cluster, settings.model.name
    machine, model = cluster.gpus_per_machine, MODELS.get(name)
    fitting = [n for n in range(1, machine + 1) if not machine % n and (model is None or model.can_share(n))]
    possible = f"possible on machines of {machine} are {', '.join(map(str, fitting))}"
    if size > machine:
        raise ConfigError(
            f"model.tensor_parallel = {size} is more than cluster.gpus_per_machine = {machine}: one rollout is on one "
            f"machine; {possible} (0: the fewest GPUs that {name} needs), or raise gpus_per_machine"
        )
    if model is not None and not model.can_share(size):
        raise ConfigError(
            f"model.tensor_parallel = {size}: {name} has {model.heads} heads and {model.kv_heads} KV heads, of which "
            f"{size} GPUs cannot have equal parts; {possible}"
        )
    if machine % size and min(machine, cluster.gpus) % size:
        raise ConfigError(
            f"model.tensor_parallel = {size} leaves {machine % size} of the {machine} GPUs of each machine "
            f"(cluster.gpus_per_machine) without work; {possible}"
        )


def costs_of(settings: Settings) -> Costs:
    """Of the model on the GPU, with what was measured in its place."""
    measured = settings.costs
    if settings.model.name != MEASURED:
        cluster, model = settings.cluster, settings.model
        base = published_costs(MODELS[model.name], GPUS[cluster.gpu], model.tensor_parallel, cluster.gpus_per_machine)
        return _with_measured(base, measured, base.decode)
    size, rate = measured.version_bytes or MEASURED_BYTES, measured.bytes_per_s or MASTER_BYTES_PER_S
    load_s = measured.load_s or RELOAD_S
    base = Costs(
        decode=fitted(measured.decode).decode,
        kv_tokens=measured.kv_tokens,
        prefill_tokens_per_s=measured.prefill_tokens_per_s,
        train=Train(measured.train_tokens_per_s, 0.0, settings.cluster.gpus_per_machine),
        weights=Weights(size, rate, load_s),
        tensor_parallel=settings.model.tensor_parallel or 1,
        trainers_least=1,
    )
    return _with_measured(base, measured, None)


def _with_measured(base: Costs, measured: CostsSection, model: Decode | None) -> Costs:
    """`model`: of the decode step, as far as it is known without measuring."""
    decode = fitted(measured.decode, model) if measured.decode else Fitted(base.decode)
    weights = replace(
        base.weights,
        bytes=measured.version_bytes or base.weights.bytes,
        bytes_per_s=measured.bytes_per_s or base.weights.bytes_per_s,
        load_s=measured.load_s or base.weights.load_s,
    )
    train = replace(base.train, tokens_per_s=measured.train_tokens_per_s or base.train.tokens_per_s)
    return replace(
        base,
        decode=decode.decode,
        untold=decode.untold,
        kv_tokens=measured.kv_tokens or base.kv_tokens,
        prefill_tokens_per_s=measured.prefill_tokens_per_s or base.prefill_tokens_per_s,
        train=train,
        weights=weights,
    )
