"""The run config: one tree of frozen models, read from TOML. An unknown key is an error that names the near one.

Each field's docstring says its unit and why its default is what it is. Values that may not change on
resume are listed in `FROZEN`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from laminar.buffer.keys import RUN_NAME
from laminar.config_places import CoordinationConfig, Section, StorageConfig
from laminar.config_values import explain_all, overridden, refuse_secrets
from laminar.errors import ConfigError


class RunConfig(Section):
    name: str = "run"
    """Name of the run: its etcd prefix, and its folder where `store` is not given."""

    @field_validator("name")
    @classmethod
    def _usable(cls, name: str) -> str:
        if not RUN_NAME.fullmatch(name):
            raise ValueError(
                f"run.name = {name!r} is not usable: 1 to 63 of a-z, 0-9, '.', '_', '-', first a letter or digit"
            )
        return name

    store: str = ""
    """Root of the store: a folder or any fsspec URL that Lance also opens. Empty: `runs/<name>`."""

    @field_validator("store")
    @classmethod
    def _public_store(cls, store: str) -> str:
        refuse_secrets(store, "run.store", "object stores take their keys from the environment (AWS_…, GOOGLE_…)")
        return store

    seed: int = 0
    """Seed of the order of prompts and of sampling. Frozen once the run has started."""
    max_steps: int = Field(40, ge=1, le=1_000_000_000)
    """Optimizer steps after which the run is done."""
    epochs: int = Field(1_000_000, ge=1, le=1_000_000_000)
    """Passes over the prompt pool after which drawing stops; large, since `max_steps` is the usual end."""


class ModelConfig(Section):
    path: str
    """A Hugging Face folder, or a built-in name: `smollm2-135m-instruct` (comes with the quick-start's set-up) or
    `tiny-reverse` (built in seconds)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the published weights, of the engine's and of the trainer's compute; master weights are float32."""


class PromptsConfig(Section):
    source: Literal["reasoning-gym", "file", "huggingface", "reverse"] = "reasoning-gym"
    """Where prompts come from: a procedural data set, a .parquet or .jsonl file, a Hugging Face data set, or the tiny
    fixture's words."""
    dataset: str = ""
    """Name of the reasoning-gym or Hugging Face data set, or path of the file."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of the data set (reasoning-gym: its config; huggingface: `split`, `name`). No secrets: the
    hub's token comes from HF_TOKEN."""

    @field_validator("options")
    @classmethod
    def _public_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        refuse_secrets(options, "prompts.options", "the Hugging Face hub takes its token from the variable HF_TOKEN")
        return options

    size: int = Field(1000, ge=1)
    """How many training prompts to take at most."""
    seed: int = 1000
    """Seed of procedural sources. Neighbouring seeds of reasoning-gym share problems: space them far apart."""
    prompt_column: str = "prompt"
    """Column of the prompt in a file or data set: text, or messages."""
    answer_column: str = "answer"
    """Column of the reference answer; may be missing."""
    system: str = ""
    """System message put before each prompt that is plain text; empty: none."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are left out, counted and named."""


class EnvironmentConfig(Section):
    name: str = "single-turn"
    """`single-turn`, `calculator`, or `module:name` of an Environment."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of the environment. No secrets: it reads them from environment variables."""

    @field_validator("options")
    @classmethod
    def _public_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        refuse_secrets(options, "environment.options", "let the environment read a variable (os.environ) instead")
        return options

    max_turns: int = Field(1, ge=1)
    """Policy turns after which a trajectory is finished."""


class RewardConfig(Section):
    name: str = "reasoning-gym"
    """`reasoning-gym`, `exact`, `http`, or `module:name` of a function (prompt, transcript) -> Score or float."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of the reward (http: `url`, and `api_key_env`, the name of the environment variable that holds
    its key). No secrets: they would be written to `run.json`."""

    @field_validator("options")
    @classmethod
    def _public_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        remedy = (
            "the http reward takes api_key_env = 'NAME', a variable whose value it sends as a bearer token; a reward "
            "of your own can read one itself (os.environ)"
        )
        refuse_secrets(options, "reward.options", remedy)
        return options

    timeout: float = Field(30.0, gt=0, le=86_400)
    """Seconds after which a reward or environment call is killed; the trajectory's status says so."""
    workers: int = Field(1, ge=1)
    """Scoring processes of each rollout."""


class SamplingConfig(Section):
    samples_per_prompt: int = Field(8, ge=1, le=120)
    """Trajectories of a group. Frozen. At most 120: a group is drawn in one etcd transaction."""
    temperature: float = Field(1.0, ge=0.01, le=2)
    """Softmax temperature, of behaviour logprobs and of the trainer's alike; 0.01 to 2 is what all engines sample."""
    max_tokens: int = Field(256, ge=1)
    """Policy tokens of a trajectory at most, over all its turns."""
    top_p: float = 1.0
    """Must be 1: a truncated distribution makes behaviour logprobs ambiguous."""
    top_k: int = -1
    """Must be -1 (off), for the same reason."""
    min_p: float = 0.0
    """Must be 0, for the same reason."""
    repetition_penalty: float = 1.0
    """Must be 1, for the same reason."""
    chat_template_options: dict[str, Any] = Field({})
    """Keyword arguments of the tokenizer's chat template (such as `enable_thinking`)."""

    @model_validator(mode="after")
    def _unambiguous(self) -> SamplingConfig:
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"sampling.{name} = {getattr(self, name)} changes the distribution that tokens are drawn from, so "
                    f"that the trainer's logprobs would not match the engine's; set it to {off} and use temperature"
                )
        return self


class RolloutConfig(Section):
    workers: int = Field(1, ge=1)
    """Rollout processes that `laminar run` starts."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` is a small reference engine for tests and debugging."""
    max_running: int = Field(64, ge=1)
    """Trajectories that a rollout generates at once."""
    max_model_len: int = Field(1024, ge=8)
    """Prompt and response tokens of a trajectory at most."""
    kv_cache_mib: int = Field(0, ge=0)
    """KV cache in MiB; 0: 256 on CPU, the engine's own choice on CUDA."""
    flush_interval: float = Field(0.0, ge=0, le=3600)
    """Seconds between two flushes of partial responses: what a crash loses at most. 0: 0.5 in a folder, 5 in an object
    store, where each flush is a request that is paid for."""
    fsync: bool = True
    """One fsync a flush. Off: a power cut may lose what a crash of the process does not."""
    threads: int = Field(1, ge=1)
    """CPU threads of an engine on a CPU."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """Devices of one host that share an engine's model (vLLM). Each reads only its part of every version."""
    update: Literal["drain", "interrupt"] = "drain"
    """`drain`: a rollout finishes what it has begun under one version before it takes the next. `interrupt`: it swaps
    the weights under what it has begun, whose rows then span versions; for comparison."""
    repack_interval: float = Field(5.0, ge=0, le=3600)
    """Seconds between two looks at whether draining rollouts can give their tails to each other, so that most of them
    take the newest version at once; each publish is followed by one too. 0: off."""
    on_version_lost: Literal["continue", "restart"] = "continue"
    """When nothing can bring a version back: go on under the newest (spans say so), or start the trajectory again."""
    partials: bool = True
    """Stream partial responses to the store. Off only to measure what that costs."""


class TrainerConfig(Section):
    groups_per_step: int = Field(8, ge=1)
    """Whole groups that one optimizer step consumes."""
    max_ahead_groups: int = Field(0, ge=0)
    """Groups drawn but not consumed at most; 0: two steps' groups. Bounds how many, not how old they get."""
    max_ready_groups: int = Field(0, ge=0)
    """While so many complete groups wait for the trainer, no more are drawn, which would only get old; those under way
    come beside. 0: one step's groups; with `no_signal = "replace"`, where only the trainer knows how many of them it
    can train on, no bound but max_ahead_groups."""
    max_staleness: int | None = Field(None, ge=0)
    """Steps' groups that may be drawn beyond those of the next step. Groups that end in the order in which they were
    drawn are at most this many versions old when they are trained on. It does not bound the age of one that ends late:
    it keeps its place, others pass it, and each step that they make is a version more. 0: rollouts and trainer take
    turns, and all is of the newest version, exactly; absent: no bound but max_ahead_groups. Nothing is ever dropped for
    its age."""
    learning_rate: float = Field(1e-6, gt=0, le=1)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int = Field(0, ge=0)
    """Steps after the warm-up in which the learning rate falls, along half a cosine, to `decay_to` of its peak, where
    it stays; 0: it stays at its peak."""
    decay_to: float = Field(0.1, ge=0, le=1)
    """Share of the peak learning rate that is left after `decay_steps`."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW moments, each from 0 to below 1."""

    @field_validator("betas")
    @classmethod
    def _decaying(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"trainer.betas = {list(betas)}: each must be from 0 to below 1, such as [0.9, 0.99]")
        return betas

    weight_decay: float = Field(0.0, ge=0, le=1)
    """AdamW weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping by global norm."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++"] = "grpo"
    """Advantage estimator."""
    loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    """Policy loss."""
    aggregation: Literal["token", "sequence"] = "token"
    """Mean over all policy tokens of the step, or over sequences of their means."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip range of the ratio."""
    clip_high: float = Field(0.28, gt=0, le=1000)
    """Upper clip range (clip-higher, DAPO)."""
    importance_cap: float = Field(0.0, ge=0)
    """Truncated importance sampling against the engine's logprobs: cap of the weight; 0: off."""
    kl_coefficient: float = Field(0.0, ge=0, le=1000)
    """Weight of the k3 estimate of KL to the initial policy; 0: no reference model is held."""
    mask_truncated: bool = False
    """Leave trajectories that ended by length out of the loss (they keep their place in the group's baseline)."""
    no_signal: Literal["count", "replace"] = "count"
    """Groups of equal rewards: count towards groups_per_step and, with a loss of 0, in its mean (no compute), or be
    replaced by later groups (DAPO). A run ends as failed after 1,000 of them, and 100 steps' worth, if no step comes of
    what is between."""
    last_batch: Literal["train", "retire"] = "train"
    """What happens to a last short batch."""
    micro_batch_tokens: int = Field(4096, ge=16)
    """Padded tokens of a micro-batch at most."""
    share_prompts: bool = True
    """Compute a group's prompt once for all its samples."""
    skip_no_signal: bool = True
    """Do not compute groups whose advantages are all zero. Off only to measure what that saves."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints kept; the newest ones."""
    keep_batches: Literal["checkpoints", "all"] = "checkpoints"
    """Batch files kept: those that a restart from a kept checkpoint would train on again, or all. The others only hold
    rows that the experience has too, from which they are made again when they are needed."""
    devices: int = Field(1, ge=1, le=64)
    """Devices of the trainer's host, each with a process of its own, over which weights, gradients and optimizer are
    sharded (FSDP): GPUs where there are any. More than 1 is for a model that one device does not hold."""
    threads: int = Field(0, ge=0)
    """CPU threads of each of the trainer's processes; 0: all cores but one for each rollout, shared among them, at
    least one."""
    deterministic: bool = True
    """Deterministic kernels, so that replayed steps give the same bits."""
    max_error_share: float = Field(0.5, gt=0, le=1)
    """More than this share of errors among the newest trajectories ends the run with that error. Looked at are the last
    64, or as many as there are, once two groups' worth (at most 64) have come since the trainer started."""


class EvaluationConfig(Section):
    size: int = Field(0, ge=0)
    """Held-out prompts, disjoint from training by content; 0: no evaluation."""
    every: int = Field(10, ge=1)
    """Steps between evaluations; the first and the last version are always evaluated."""
    samples: int = Field(4, ge=1)
    """Samples a prompt at the training temperature, for avg@k and pass@k; one more is greedy."""
    seed: int = 900_000_000
    """Seed of procedural held-out prompts."""
    max_tokens: int = Field(0, ge=0)
    """Response tokens; 0: as in training."""


class RelayConfig(Section):
    chunk_mib: int = Field(4, ge=1, le=64)
    """Size of a checksummed chunk, MiB: the least that travels from relay to relay. What travels at once is computed,
    1 to 64 MiB, from the length of the chain and the rate of its links. Weights have a million chunks at most."""
    retain: int = Field(2, ge=1)
    """Newest versions kept beside those that claims refer to."""
    memory_share: float = Field(0.25, ge=0, lt=1)
    """Share of the host's memory, or of its container's limit, up to which shared memory (all versions of all relays
    there) grows to keep versions that claims refer to; a tenth of memory always stays free for others. One such version
    fits in any case. 0: no more than that."""
    bind: str = "127.0.0.1"
    """Where relays listen for each other: an address, `0.0.0.0` for all, or a network such as `10.1.0.0/16` of which
    each host takes its own address. With the default no weights leave the host. LAMINAR_RELAY_BIND overrides it."""
    port: int = Field(0, ge=0, lt=65536)
    """Port that relays listen at, and with RDMA the one after it, so at most 65534 unless `transport` is `tcp`; 0: any
    free ones. If fixed, one relay a host."""
    advertise: str = ""
    """Host name or address by which others reach a relay, if not the one it listens at (`0.0.0.0`: the host's name).
    Mostly given as LAMINAR_RELAY_ADVERTISE, since it differs from host to host."""
    transport: Literal["auto", "tcp", "verbs"] = "auto"
    """How weights go from host to host: `auto` takes RDMA between hosts that both have a device, `verbs` refuses to
    start without one. LAMINAR_RDMA_DEVICE (`mlx5_0` or `mlx5_0:1`) names it; else the one with the relay's address."""
    streams: int = Field(0, ge=0, le=16)
    """Connections a hop; more help where single ones are slowed. 0: one, and two after a transfer above 1.5 GB/s,
    where a core is the limit."""
    delta_share: float = Field(0.5, ge=0, le=1)
    """Over TCP a piece goes as its lossless difference to the version before, where both relays hold that, if it takes
    at most this share of its bytes, and as long as versions come faster so than whole; 0: always whole."""
    stall_timeout: float = Field(2.0, ge=0.5)
    """Seconds of silence after which the relay before counts as dead; living ones speak four times a second."""

    @model_validator(mode="after")
    def _ports_exist(self) -> RelayConfig:
        if self.port == 65535 and self.transport != "tcp":
            raise ValueError(
                f"relay.port = 65535 with relay.transport = {self.transport!r}: RDMA uses the port after it, "
                "and 65535 is the last one there is; set relay.port to 65534 or less, or relay.transport to 'tcp'"
            )
        return self


class LoggingConfig(Section):
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """INFO tells the story of the run, DEBUG of each trajectory."""
    tensorboard: bool = True
    """Write TensorBoard files under the store (local stores only)."""
    sinks: list[Literal["wandb", "trackio"]] = Field([])
    """Further metric sinks, if installed."""


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    prompts: PromptsConfig = PromptsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    relay: RelayConfig = RelayConfig()
    storage: StorageConfig = StorageConfig()
    coordination: CoordinationConfig = CoordinationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        t, s = self.trainer, self.sampling
        if s.samples_per_prompt == 1 and t.advantage in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(
                f"sampling.samples_per_prompt = 1 with trainer.advantage = {t.advantage!r}: a group baseline needs at "
                "least 2 samples; raise samples_per_prompt or use advantage = 'reinforce++'"
            )
        if t.max_ahead_groups and t.max_ahead_groups < t.groups_per_step:
            raise ValueError(
                f"trainer.max_ahead_groups = {t.max_ahead_groups} is below groups_per_step = {t.groups_per_step}: the "
                "trainer could never fill a batch; set it to at least two steps' groups, or 0"
            )
        if t.max_ready_groups and t.max_ready_groups < t.groups_per_step:
            raise ValueError(
                f"trainer.max_ready_groups = {t.max_ready_groups} is below groups_per_step = {t.groups_per_step}: the "
                "trainer could never fill a batch; set it to at least one step's groups, or 0"
            )
        r = self.rollout
        if r.tensor_parallel > 1 and r.engine != "vllm":
            raise ValueError(
                f"rollout.tensor_parallel = {r.tensor_parallel} with rollout.engine = {r.engine!r}: only vllm spreads "
                "a model over devices; set tensor_parallel to 1"
            )
        if self.rollout.max_running < s.samples_per_prompt:
            raise ValueError(
                f"rollout.max_running = {self.rollout.max_running} is below sampling.samples_per_prompt = "
                f"{s.samples_per_prompt}: a rollout draws whole groups, so it could never draw one; raise max_running"
            )
        if s.max_tokens >= self.rollout.max_model_len:
            raise ValueError(
                f"sampling.max_tokens = {s.max_tokens} leaves no room for a prompt in rollout.max_model_len = "
                f"{self.rollout.max_model_len}; raise max_model_len"
            )
        return self

    @property
    def max_ahead_groups(self) -> int:
        """Groups that may be drawn and not yet consumed."""
        return self.trainer.max_ahead_groups or 2 * self.trainer.groups_per_step

    @property
    def max_ready_groups(self) -> int:
        """Complete groups, not yet consumed, from which on no more are drawn."""
        t = self.trainer
        return t.max_ready_groups or (t.groups_per_step if t.no_signal == "count" else self.max_ahead_groups)

    @property
    def flush_interval(self) -> float:
        """Seconds between two flushes of partial responses."""
        return self.rollout.flush_interval or (5.0 if is_object_store(self.store_root) else 0.5)

    @property
    def store_root(self) -> str:
        return self.run.store or f"runs/{self.run.name}"


def is_object_store(root: str) -> bool:
    return "://" in root and not root.startswith("file://")


FROZEN = (
    "run.seed", "sampling.samples_per_prompt", "model.path", "model.dtype", "relay.chunk_mib", "rollout.update",
)  # fmt: skip
"""Values of the config that a resume may not change; fingerprints of model, tokenizer and prompts are compared as
well. Digests of weights depend on the size of a chunk; whether rows may span versions, on `rollout.update`."""


def parse_config(text: str, *, origin: str = "config") -> Config:
    """Raises ConfigError naming each bad key, the near key for a misspelt one, and what was expected."""
    return config_from(_parse(text, origin), origin=origin)


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{origin} is not valid TOML: {e}") from e


def load_config(path: str | Path) -> Config:
    return load_config_with(path, [])[0]


def load_config_with(path: str | Path, overrides: list[str]) -> tuple[Config, str]:
    """The config of a file with `section.key=value` strings applied to it, and the file's text as it stands."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot read the config {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"the config {path} is not UTF-8: {e}") from e
    data = with_overrides(_parse(text, str(path)), overrides)
    return config_from(data, origin=str(path), overrides=overrides), text


def config_from(data: dict[str, Any], *, origin: str = "config", overrides: Sequence[str] = ()) -> Config:
    """`origin`: where it is from, but for the values that are of `overrides` (`section.key=value`)."""
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        raise ConfigError(explain_all(e, Config, origin=origin, overrides=overrides)) from e


def with_overrides(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Apply `section.key=value` strings (values in TOML syntax; bare words are strings) to parsed TOML."""
    return overridden(data, overrides, Config)
