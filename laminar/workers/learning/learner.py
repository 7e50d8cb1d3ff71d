"""The real learner: one optimizer step on whole groups, with torch.

    batch -> advantages -> rows with signal -> micro-batches -> logprobs -> loss -> gradients (float32)
          -> clip -> AdamW on the float32 master weights -> cast -> published weights

Invariants: the loss is a sum with the weights of the whole step, so micro-batches change nothing but memory. Old
logprobs are the engine's own. A group without signal is not trained on; with none left there is no update, and the
version grows all the same. The same state, batch and hardware give the same bits: no dropout, no random numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from laminar.config import TrainerConfig
from laminar.errors import LaminarError, WeightsError
from laminar.relay.layout import Layout
from laminar.relay.writing import Invitation
from laminar.workers.learning import checkpoint
from laminar.workers.learning.advantages import Advantages, compute_advantages
from laminar.workers.learning.agreement import engine_kl
from laminar.workers.learning.base import Sample, StepResult
from laminar.workers.learning.forward import can_share_prompts, score
from laminar.workers.learning.inputs import assemble, check_batch, row_of, scored_mask
from laminar.workers.learning.loading import set_process
from laminar.workers.learning.losses import kl_k3, policy_loss, token_weights
from laminar.workers.learning.parameters import Parameters, Pass
from laminar.workers.learning.schedule import learning_rate
from laminar.workers.learning.settings import settings_of, with_settings
from laminar.workers.learning.tally import Tally, batch_metrics

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, by its names."""


class TorchLearner:
    """Implements `base.Learner` on CUDA where there is one, else on the CPU.

    `temperature` is that of the sampling. With bfloat16 the model computes and is published in it, while AdamW works on
    float32 master weights. Process-wide effects: `config.threads` (if not 0) and, with `config.deterministic`, torch's
    deterministic algorithms.
    Raises ConfigError for a model that cannot be trained or published as it is.
    """

    def __init__(
        self,
        model_folder: Path,
        config: TrainerConfig,
        *,
        temperature: float,
        dtype: Literal["bfloat16", "float32"],
    ) -> None:
        set_process(config)
        self.config = config
        self._folder = model_folder
        self._temperature = temperature
        self.parameters = self._load(getattr(torch, dtype))
        self._model, self._device = self.parameters.model, self.parameters.device
        self._reference: Any = None
        self._prepare()
        self._optimizer = torch.optim.AdamW(
            self.parameters.masters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._version = self._updates = 0

    def _load(self, dtype: torch.dtype) -> Parameters:
        return Parameters(self._folder, dtype)

    @property
    def version(self) -> int:
        return self._version

    @property
    def layout(self) -> Layout:
        return self.parameters.layout

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.config, self._temperature)

    def configure(self, settings: Mapping[str, Any]) -> None:
        """See `base.Learner.configure`; process-wide effects as at the start."""
        if {**self.settings, **settings} == self.settings:
            return
        self.config, self._temperature = with_settings(self.config, self._temperature, settings)
        set_process(self.config)
        for group in self._optimizer.param_groups:
            group.update(betas=self.config.betas, weight_decay=self.config.weight_decay)
        self._prepare()

    def _prepare(self) -> None:
        """What the config asks for beside the model itself."""
        if self.config.kl_coefficient > 0 and self._reference is None:
            self._reference = self.parameters.reference()
        self._share = self.config.share_prompts and can_share_prompts(self._model)
        if self.config.share_prompts and not self._share:
            log.warning("trainer.share_prompts is off: %s has layers without full attention", self._folder.name)

    def train(self, batch: Sequence[Sample], fresh: Callable[[], Sequence[Sample]] | None = None) -> StepResult:
        """See `base.Learner.train`. An update with a non-finite gradient is skipped, and said in `skipped_nonfinite`.

        A batch without any trajectory is legal (every group of the step was retired): no update, one version more.
        Raises LaminarError for a malformed trajectory, naming it.
        """
        self._check(batch)
        self.parameters.cast()
        started = self._now()
        advantages = self._advantages(batch)
        tally, trained_tokens = self._accumulate(batch, advantages)
        computed = self._now()
        agreement = self._agreement(batch, tally, fresh)
        agreed = self._now()
        outcome = self._update() if trained_tokens else {"grad_norm": None, "skipped_nonfinite": 0.0}
        metrics: dict[str, float | None] = {
            **batch_metrics(batch),
            **tally.metrics(with_reference=self.config.kl_coefficient > 0),
            **agreement,
            **outcome,
            "learning_rate": learning_rate(self.config, self._version),
            "no_signal_groups": float(len(advantages.no_signal)),
            "tokens": float(trained_tokens),
            "forward_backward_s": computed - started,
            "agreement_s": agreed - computed,
            "optimizer_s": self._now() - agreed,
        }
        values = advantages.values.tolist()
        stats = [tally.stats(i, s, values[i]) for i, s in enumerate(batch)]
        self._version += 1
        return StepResult(stats, metrics)

    def stage(self) -> float:
        started = self._now()
        self.parameters.cast()
        return self._now() - started

    @property
    def writers(self) -> int:
        return 1

    def write_weights(self, buffer: memoryview, invitation: Invitation | None = None) -> int:
        self.parameters.cast()
        return self.parameters.write(buffer)

    def save(self, folder: Path) -> None:
        state = checkpoint.LearnerState(
            version=self._version,
            updates=self._updates,
            layout_digest=self.layout.digest,
            dtype=str(self.parameters.dtype).removeprefix("torch."),
        )
        checkpoint.write(folder, state, *self._gathered())

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Masters and AdamW's moments, whole."""
        masters = self.parameters.masters
        moments = {
            f"{kind}.{name}": self._optimizer.state[master][kind]
            for name, master in masters.items()
            if master in self._optimizer.state
            for kind in MOMENTS
        }
        return self.parameters.whole(masters), self.parameters.whole(moments)

    def verify(self, folder: Path) -> None:
        self._require_own(folder, checkpoint.verify(folder))

    def _require_own(self, folder: Path, state: checkpoint.LearnerState) -> None:
        if state.layout_digest != self.layout.digest:
            raise WeightsError(
                f"the checkpoint {folder} is of a model with layout {state.layout_digest[:12]} in {state.dtype}, the "
                f"present one has {self.layout.digest[:12]} in {self.parameters.dtype}; model and dtype may not change "
                "in a run"
            )

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises WeightsError, changing nothing, if it is damaged or foreign."""
        state = checkpoint.verify(folder)
        self._require_own(folder, state)
        masters = self.parameters.masters
        with checkpoint.opened(folder) as (stored, moments):
            # A parameter without a gradient so far has no moments.
            moved = {name for name in masters if f"exp_avg.{name}" in moments}
            expected = {f"{kind}.{name}" for name in moved for kind in MOMENTS}
            if stored.keys() != masters.keys() or moments.keys() != expected or bool(moved) != bool(state.updates):
                raise WeightsError(f"the checkpoint {folder} lacks tensors of the model; use another checkpoint")
            for name, master in masters.items():
                self.parameters.fill(master, stored[name])
                self._optimizer.state.pop(master, None)
                if name in moved:
                    kept = {kind: torch.zeros_like(master) for kind in MOMENTS}
                    for kind, moment in kept.items():
                        self.parameters.fill(moment, moments[f"{kind}.{name}"])
                    step = torch.tensor(float(state.updates), device=self._device)
                    self._optimizer.state[master] = {"step": step, **kept}
        self._version, self._updates = state.version, state.updates
        self.parameters.changed()

    def export(self, folder: Path) -> None:
        self.parameters.cast()
        self.parameters.export(folder)

    def close(self) -> None:
        """All of it is in this process."""

    def _advantages(self, batch: Sequence[Sample]) -> Advantages:
        rewards = torch.tensor([s.reward for s in batch], dtype=torch.float32)
        groups = torch.tensor([s.group for s in batch], dtype=torch.int64)
        return compute_advantages(self.config.advantage, rewards, groups)

    def _accumulate(self, batch: Sequence[Sample], advantages: Advantages) -> tuple[Tally, int]:
        """Gradients of the whole step onto the masters; their sums, and how many tokens have an advantage.

        A counted group without signal is part of the step, so of the mean: skipped or computed, its tokens weigh 0. A
        step in which few groups have one moves the weights less than one in which all do.
        """
        masks = [self._trained_mask(sample) for sample in batch]
        usable = [bool(mask.any()) for mask in masks]
        in_loss = [ok and s.group not in advantages.no_signal for s, ok in zip(batch, usable, strict=True)]
        counted = usable if self.config.no_signal == "count" else in_loss
        lengths = [int(mask.sum()) for mask in masks]
        tokens = sum(n for n, is_counted in zip(lengths, counted, strict=True) if is_counted)
        computed = in_loss if self.config.skip_no_signal else usable
        rows = [row_of(i, batch[i], masks[i]) for i, is_computed in enumerate(computed) if is_computed]
        tally = Tally()
        budget = self.config.micro_batch_tokens
        for one in self.parameters.passes(rows, budget=budget, share_prompts=self._share):
            of, to = (in_loss, tally) if one.counts else ([False] * len(batch), Tally())
            loss = self._micro_loss(batch, masks, one, advantages.values, of, tokens, sum(counted), to)
            loss.backward()  # type: ignore[no-untyped-call]
            self.parameters.gather_gradients()
        return tally, sum(n for n, is_kept in zip(lengths, in_loss, strict=True) if is_kept)

    def _trained_mask(self, sample: Sample) -> Tensor:
        """bool [length]: the tokens that the loss may use."""
        return scored_mask(sample)[: 0 if self.config.mask_truncated and sample.truncated else None]

    def _micro_loss(
        self,
        batch: Sequence[Sample],
        masks: Sequence[Tensor],
        one: Pass,
        advantages: Tensor,
        in_loss: Sequence[bool],
        tokens: int,
        sequences: int,
        tally: Tally,
    ) -> Tensor:
        """The part of the step's loss that these rows make, a scalar; `tally` gets their sums."""
        order = one.micro.rows
        inputs = assemble(batch, masks, one.micro, self._device)
        mask, behaviour = inputs.mask, inputs.behaviour
        temperature = self._temperature
        scores = score(self._model, inputs.prompts, inputs.ids, mask, temperature=temperature, shared=one.shared)
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
        if self.config.kl_coefficient > 0:
            with torch.no_grad():
                reference = score(
                    self._reference, inputs.prompts, inputs.ids, mask, temperature=temperature, shared=one.shared
                )
            reference_kl = kl_k3(scores.logprobs, reference.logprobs, mask)
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

    def _agreement(
        self, batch: Sequence[Sample], tally: Tally, fresh: Callable[[], Sequence[Sample]] | None
    ) -> dict[str, float | None]:
        """The engine's logprobs against these weights: on the batch's rows of this version, else on fresh ones."""
        kl, count = tally.engine_kl(i for i, s in enumerate(batch) if s.version == self._version)
        samples = fresh() if fresh is not None and not count else ()
        if samples:
            self._check(samples)
            stale = [s for s in samples if s.version != self._version]
            if stale:
                raise LaminarError(
                    f"trajectory {stale[0].group}-{stale[0].sample} is of version {stale[0].version}, to be compared "
                    f"with version {self._version}"
                )
            count = len(samples)
            kl = self._compare(samples)
        return {"kl_engine_trainer": kl, "kl_engine_trainer_trajectories": float(count)}

    def _compare(self, samples: Sequence[Sample]) -> float | None:
        return engine_kl(
            self._model, samples, temperature=self._temperature, budget=self.config.micro_batch_tokens,
            share_prompts=self._share, device=self._device,
        )  # fmt: skip

    def _check(self, samples: Sequence[Sample]) -> None:
        check_batch(samples, vocabulary=self._model.get_input_embeddings().num_embeddings)

    def _update(self) -> dict[str, float | None]:
        """Clip and step; gradients are dropped whatever happens."""
        norm = self.parameters.clip_gradients(self.config.max_grad_norm)
        finite = norm < float("inf")
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(self.config, self._version)
            self._optimizer.step()
            self._updates += 1
            self.parameters.changed()
        self._optimizer.zero_grad(set_to_none=True)
        if not finite:
            log.warning("step %d: gradient norm %s, the update is skipped", self._version, norm)
        return {"grad_norm": norm if finite else None, "skipped_nonfinite": float(not finite)}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
