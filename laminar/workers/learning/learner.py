"""The real learner: one optimizer step on whole groups, with torch.

    batch -> advantages -> rows with signal -> micro-batches -> logprobs -> loss -> gradients (float32)
          -> clip -> AdamW on the float32 master weights -> cast -> published weights

Invariants: the loss is a sum with the weights of the whole step, so micro-batches change nothing but memory. Old
logprobs are the engine's own. A group without signal is not trained on; with none left there is no update, and the
version grows all the same. The same state, batch and hardware give the same bits: no dropout, no random numbers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from laminar.config import TrainerConfig
from laminar.errors import ConfigError, LaminarError, WeightsError
from laminar.relay.layout import Layout
from laminar.relay.tensors import copy_into, layout_of
from laminar.workers.learning import checkpoint
from laminar.workers.learning.advantages import compute_advantages
from laminar.workers.learning.base import Sample, StepResult
from laminar.workers.learning.batching import MicroBatch, Row, pack
from laminar.workers.learning.forward import PAD, Prompted, can_share_prompts, score
from laminar.workers.learning.losses import kl_k3, policy_loss, token_weights
from laminar.workers.learning.tally import Tally, batch_metrics
from laminar.workers.models import copy_tokenizer, tensor_names

log = logging.getLogger(__name__)

MAX_NONFINITE_IN_A_ROW = 3
"""One overflow is weather; three steps in a row without a usable gradient is a broken run."""


class TorchLearner:
    """Implements `base.Learner` on CUDA where there is one, else on the CPU.

    `temperature` is that of the sampling. `total_steps` is the length of the run, which must outlast the warm-up. With
    bfloat16 the model computes and is published in it, while AdamW works on float32 master weights. Process-wide
    effects: `config.threads` (if not 0) and, with `config.deterministic`, torch's deterministic algorithms.
    Raises ConfigError for a model that cannot be trained or published as it is.
    """

    def __init__(
        self,
        model_folder: Path,
        config: TrainerConfig,
        *,
        temperature: float,
        dtype: Literal["bfloat16", "float32"],
        total_steps: int,
    ) -> None:
        if config.warmup_steps >= total_steps:
            raise ConfigError(
                f"trainer.warmup_steps = {config.warmup_steps} is not below run.max_steps = {total_steps}: the "
                "learning rate would never reach its peak; shorten the warm-up"
            )
        if config.threads:
            torch.set_num_threads(config.threads)
        _set_determinism(config.deterministic)
        self.config = config
        self._folder = model_folder
        self._temperature = temperature
        self._dtype = getattr(torch, dtype)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = _load_model(model_folder, torch.float32).to(self._device)
        self._masters = self._split_masters()
        self._reference = self._load_reference() if config.kl_coefficient > 0 else None
        self._share = config.share_prompts and can_share_prompts(self._model)
        if config.share_prompts and not self._share:
            log.warning("trainer.share_prompts is off: %s has layers without full attention", model_folder.name)
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._published = self._published_tensors()
        self._layout = layout_of(self._published)
        self._version = self._updates = self._nonfinite_in_a_row = 0
        self._stale = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def layout(self) -> Layout:
        return self._layout

    def train(self, batch: Sequence[Sample]) -> StepResult:
        """See `base.Learner.train`. An update with a non-finite gradient is skipped, and said in `skipped_nonfinite`.

        A batch without any trajectory is legal (every group of the step was retired): no update, one version more.
        Raises LaminarError for a malformed trajectory, naming it, and on the third non-finite gradient in a row.
        """
        check_batch(batch, vocabulary=self._model.get_input_embeddings().num_embeddings)
        self._cast()
        started = self._now()
        rewards = torch.tensor([s.reward for s in batch], dtype=torch.float32)
        groups = torch.tensor([s.group for s in batch], dtype=torch.int64)
        advantages = compute_advantages(self.config.advantage, rewards, groups)
        tally, trained_tokens = self._accumulate(batch, advantages.values, advantages.no_signal)
        computed = self._now()
        outcome = self._update() if trained_tokens else {"grad_norm": None, "skipped_nonfinite": 0.0}
        fresh = frozenset(i for i, s in enumerate(batch) if s.version == self._version)
        metrics: dict[str, float | None] = {
            **batch_metrics(batch),
            **tally.metrics(fresh, with_reference=self._reference is not None),
            **outcome,
            "learning_rate": self._learning_rate(),
            "no_signal_groups": float(len(advantages.no_signal)),
            "tokens": float(trained_tokens),
            "forward_backward_s": computed - started,
            "optimizer_s": self._now() - computed,
        }
        values = advantages.values.tolist()
        stats = [tally.stats(i, s, values[i]) for i, s in enumerate(batch)]
        self._version += 1
        return StepResult(stats, metrics)

    def stage(self) -> float:
        started = self._now()
        self._cast()
        return self._now() - started

    def write_weights(self, buffer: memoryview) -> None:
        self._cast()
        copy_into(buffer, self._layout, self._published)

    def save(self, folder: Path) -> None:
        state = checkpoint.LearnerState(
            version=self._version,
            updates=self._updates,
            nonfinite_in_a_row=self._nonfinite_in_a_row,
            layout_digest=self._layout.digest,
            dtype=str(self._dtype).removeprefix("torch."),
        )
        moments = {
            f"{kind}.{name}": self._optimizer.state[master][kind]
            for name, master in self._masters.items()
            if master in self._optimizer.state
            for kind in ("exp_avg", "exp_avg_sq")
        }
        checkpoint.write(folder, state, {name: m.detach() for name, m in self._masters.items()}, moments)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises WeightsError, changing nothing, if it is damaged or foreign."""
        state, masters, moments = checkpoint.read(folder)
        if state.layout_digest != self._layout.digest:
            raise WeightsError(
                f"the checkpoint {folder} is of a model with layout {state.layout_digest[:12]} in {state.dtype}, the "
                f"present one has {self._layout.digest[:12]} in {self._dtype}; model and dtype may not change in a run"
            )
        # A parameter without a gradient so far has no moments.
        moved = {name for name in self._masters if f"exp_avg.{name}" in moments}
        expected = {f"{kind}.{name}" for name in moved for kind in ("exp_avg", "exp_avg_sq")}
        if masters.keys() != self._masters.keys() or moments.keys() != expected or bool(moved) != bool(state.updates):
            raise WeightsError(f"the checkpoint {folder} lacks tensors of the model; use another checkpoint")
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(masters[name])
                self._optimizer.state.pop(master, None)
                if name in moved:
                    self._optimizer.state[master] = {
                        "step": torch.tensor(float(state.updates), device=self._device),
                        **{k: moments[f"{k}.{name}"].to(self._device) for k in ("exp_avg", "exp_avg_sq")},
                    }
        self._version, self._updates = state.version, state.updates
        self._nonfinite_in_a_row = state.nonfinite_in_a_row
        self._stale = True

    def export(self, folder: Path) -> None:
        self._cast()
        self._model.config.dtype = self._dtype
        self._model.save_pretrained(folder)
        copy_tokenizer(self._folder, folder)

    def _accumulate(self, batch: Sequence[Sample], advantages: Tensor, no_signal: frozenset[int]) -> tuple[Tally, int]:
        """Gradients of the whole step onto the masters; what was counted, and the tokens that entered the loss."""
        masks = [self._trained_mask(sample) for sample in batch]
        in_loss = [bool(mask.any()) and s.group not in no_signal for s, mask in zip(batch, masks, strict=True)]
        skip = self.config.skip_no_signal
        computed = [i for i, mask in enumerate(masks) if bool(mask.any()) and (in_loss[i] or not skip)]
        tokens = sum(int(mask.sum()) for mask, kept in zip(masks, in_loss, strict=True) if kept)
        rows = [
            Row(i, (batch[i].group, tuple(batch[i].prompt_ids)), len(batch[i].prompt_ids), len(masks[i]))
            for i in computed
        ]
        tally = Tally()
        for micro in pack(rows, budget=self.config.micro_batch_tokens, share_prompts=self._share):
            loss = self._micro_loss(batch, masks, micro, advantages, in_loss, tokens, sum(in_loss), tally)
            loss.backward()  # type: ignore[no-untyped-call]
            self._gather_gradients()
        return tally, tokens

    def _trained_mask(self, sample: Sample) -> Tensor:
        """bool [length]: the tokens that the loss may use, cut after the last: nothing later can influence it."""
        mask = torch.tensor(sample.policy_mask, dtype=torch.bool)
        if self.config.mask_truncated and sample.truncated:
            mask = torch.zeros_like(mask)
        return mask[: int(mask.nonzero().max()) + 1] if bool(mask.any()) else mask[:0]

    def _micro_loss(
        self,
        batch: Sequence[Sample],
        masks: Sequence[Tensor],
        micro: MicroBatch,
        advantages: Tensor,
        in_loss: Sequence[bool],
        tokens: int,
        sequences: int,
        tally: Tally,
    ) -> Tensor:
        """The part of the step's loss that these rows make, a scalar; `tally` gets their sums."""
        order = micro.rows
        place = {row: n for n, row in enumerate(order)}
        prompts = [Prompted(batch[b.rows[0]].prompt_ids, [place[row] for row in b.rows]) for b in micro.blocks]
        ids = self._padded([torch.tensor(batch[i].token_ids[: len(masks[i])]) for i in order], PAD)
        mask = self._padded([masks[i] for i in order], False)
        behaviour = self._padded([torch.tensor(batch[i].behaviour_logprobs[: len(masks[i])]) for i in order], 0.0)
        scores = score(self._model, prompts, ids, mask, temperature=self._temperature)
        terms = policy_loss(
            scores.logprobs,
            behaviour,
            advantages[list(order)].to(self._device),
            mask,
            loss=self.config.loss,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            importance_cap=self.config.importance_cap,
        )
        kept = torch.tensor([in_loss[i] for i in order], device=self._device)
        weights = token_weights(mask & kept[:, None], self.config.aggregation, tokens=tokens, sequences=sequences)
        reference_kl = torch.zeros_like(scores.logprobs)
        if self._reference is not None:
            with torch.no_grad():
                reference = score(self._reference, prompts, ids, mask, temperature=self._temperature).logprobs
            reference_kl = kl_k3(scores.logprobs, reference, mask)
        tally.add(
            order,
            mask,
            ratio=terms.ratio,
            clipped=terms.clipped,
            loss=terms.token_loss,
            weights=weights,
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            engine_kl=kl_k3(behaviour, scores.logprobs.detach(), mask),
            reference_kl=reference_kl,
        )
        return ((terms.token_loss + self.config.kl_coefficient * reference_kl) * weights).sum()

    def _update(self) -> dict[str, float | None]:
        """Clip and step; gradients are dropped whatever happens."""
        norm = float(nn.utils.clip_grad_norm_(self._masters.values(), self.config.max_grad_norm))
        finite = norm < float("inf")
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate()
            self._optimizer.step()
            self._updates += 1
            self._nonfinite_in_a_row = 0
            self._stale = True
        self._optimizer.zero_grad(set_to_none=True)
        if not finite:
            self._nonfinite_in_a_row += 1
            log.warning("step %d: gradient norm %s, the update is skipped", self._version, norm)
            if self._nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
                raise LaminarError(
                    f"step {self._version}: the gradient norm is {norm}, {self._nonfinite_in_a_row} steps in a row; "
                    "lower trainer.learning_rate and resume from the last checkpoint"
                )
        return {"grad_norm": norm if finite else None, "skipped_nonfinite": float(not finite)}

    def _learning_rate(self) -> float:
        """Of the step about to be taken: linear over `warmup_steps`, then constant."""
        return self.config.learning_rate * min(1.0, (self._version + 1) / max(1, self.config.warmup_steps))

    def _split_masters(self) -> dict[str, nn.Parameter]:
        """float32 masters by name, tied weights once: the model's own parameters, unless it computes in bfloat16."""
        parameters = dict(self._model.named_parameters())
        if self._dtype == torch.float32:
            return parameters
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        _cast_parameters(self._model, self._dtype)
        return masters

    def _published_tensors(self) -> dict[str, Tensor]:
        """The tensors of the Hugging Face state dict, tied ones once. Raises ConfigError if the folder has other names.

        The engine loads by the names of the model's files. transformers renames some architectures' tensors (fused
        experts, say) when it loads them; publishing those names would fail in the engine, so it is said at the start.
        """
        parameters = {name: p.detach() for name, p in self._model.named_parameters()}
        tied = {id(p) for p in self._model.parameters()}
        state = self._model.state_dict(keep_vars=True)
        buffers = {name: t.detach() for name, t in state.items() if name not in parameters and id(t) not in tied}
        unknown = sorted((parameters.keys() | buffers.keys()) - tensor_names(self._folder))
        if unknown:
            raise ConfigError(
                f"{len(unknown)} tensors of the loaded model, such as {unknown[0]!r}, are not in the files of "
                f"{self._folder}: transformers renames them on loading, so that an engine could not be sent them. "
                "Save the model once with save_pretrained, or use another architecture"
            )
        return {**parameters, **buffers}

    def _load_reference(self) -> Any:
        """The initial policy, frozen: `model_folder` stays what it was at step 0, also after a resume."""
        reference = _load_model(self._folder, torch.float32).to(self._device).requires_grad_(False)
        _cast_parameters(reference, self._dtype)
        return reference

    def _gather_gradients(self) -> None:
        """Add the model's gradients to the masters' in float32: sums over micro-batches would lose bits in bfloat16."""
        if self._dtype == torch.float32:
            return
        for parameter, master in zip(self._model.parameters(), self._masters.values(), strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.to(torch.float32)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _cast(self) -> None:
        if self._stale and self._dtype != torch.float32:
            for parameter, master in zip(self._model.parameters(), self._masters.values(), strict=True):
                parameter.copy_(master)
        self._stale = False

    def _padded(self, rows: Sequence[Tensor], fill: float) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=fill).to(self._device)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def check_batch(batch: Sequence[Sample], *, vocabulary: int) -> None:
    """Raises LaminarError naming the first trajectory that cannot be trained on, and what is wrong with it."""
    seen: set[tuple[int, int]] = set()
    for s in batch:
        name = f"trajectory {s.group}-{s.sample}"
        if (s.group, s.sample) in seen:
            raise LaminarError(f"{name} is twice in the batch")
        seen.add((s.group, s.sample))
        lengths = {len(s.token_ids), len(s.policy_mask), len(s.behaviour_logprobs)}
        if len(lengths) != 1:
            raise LaminarError(
                f"{name} has {len(s.token_ids)} tokens, {len(s.policy_mask)} mask entries and "
                f"{len(s.behaviour_logprobs)} logprobs; they must be equally many"
            )
        if not s.prompt_ids:
            raise LaminarError(f"{name} has an empty prompt; nothing predicts its first token")
        highest = max((*s.prompt_ids, *s.token_ids))
        if highest >= vocabulary or min((*s.prompt_ids, *s.token_ids)) < 0:
            raise LaminarError(f"{name} has a token outside the model's vocabulary of {vocabulary}, such as {highest}")
        for at, (logprob, policy) in enumerate(zip(s.behaviour_logprobs, s.policy_mask, strict=True)):
            if policy and not -float("inf") < logprob < float("inf"):
                raise LaminarError(f"{name} has the behaviour logprob {logprob} at token {at}; it must be finite")


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    # Its bars of a second would break up the lines of the log, at each export as well.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    # No dropout: logprobs must be those of the policy that the engine samples from.
    return model.eval()


def _cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Parameters only: `model.to(dtype)` would round the rotary frequencies as well, which engines keep in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _set_determinism(deterministic: bool) -> None:
    if deterministic:
        # cuBLAS reads it at its first use; without it the deterministic mode refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling fresh memory only helps code that reads what nobody wrote, and costs a pass over each activation.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
