"""What a comparison says: a table for the eye, JSON for programs. Pure: outcomes in, texts out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from laminar.simulator.scale.job import Job
from laminar.simulator.scale.meters import Outcome
from laminar.simulator.scale.policies import POLICIES, Pipeline

COLUMNS = (
    "policy", "GPUs", "s/step", "tokens/s", "traj/s", "idle gen", "idle train", "KV use", "staleness", "< 3", "moved",
    "last is",
)  # fmt: skip


def facts(job: Job) -> str:
    """What the costs come to, in a few lines."""
    s, costs = job.settings, job.costs
    batch = s.rollout.max_running
    lines = [
        f"{s.model.name} on {s.cluster.gpus} {s.cluster.gpu}, {costs.tensor_parallel} a rollout; steps of "
        f"{s.job.groups_per_step} x {job.samples} trajectories, of {job.lengths.mean():,.0f} tokens on average",
        f"decode step {1000 * costs.decode.step_s(1, job.context):.1f} ms alone, "
        f"{1000 * costs.decode.step_s(batch, batch * job.context):.1f} ms with {batch}; 1.5 times as long as alone "
        f"from {job.batch_limit} on; KV cache of {costs.kv_tokens:,} tokens, prefill of "
        f"{costs.prefill_tokens_per_s:,.0f} tokens/s",
        f"training {costs.train.tokens_per_s:,.0f} tokens/s a GPU; publish {costs.weights.publish_s:.2f} s, "
        f"into an engine {costs.weights.load_s:.2f} s",
    ]
    return "\n".join([*lines, *filter(None, [costs.untold, job.lengths.untold])])


def table(job: Job, outcomes: Sequence[Outcome]) -> RenderableType:
    """A row a policy; the last one is compared with the others."""
    grid = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for column in COLUMNS:
        grid.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    best = outcomes[-1]
    for o in outcomes:
        together = POLICIES[o.policy].pipeline is Pipeline.TURNS
        grid.add_row(
            o.policy,
            f"{o.gpus}" if together else f"{o.rollout_gpus}+{o.trainer_gpus}",
            f"{o.step_s:.1f}",
            f"{o.tokens_per_s:,.0f}",
            f"{o.trajectories_per_s:.1f}",
            f"{o.rollout_idle:.0%}",
            f"{o.trainer_idle:.0%}",
            f"{o.kv_share:.0%}",
            f"{o.staleness_mean:.1f}, max {o.staleness_max}",
            f"{o.staleness_below(3):.0%}",
            str(o.moved),
            f"{best.tokens_per_s / o.tokens_per_s:.2f} x",
        )
    says = "\n".join(f"{o.policy}: {POLICIES[o.policy].says}" for o in outcomes)
    notes = (
        "GPUs: generating + training. idle: of GPU time. staleness: of trained trajectories, in versions. "
        f"last is: {best.policy} / this, in tokens/s (prompts counted)."
    )
    below = [notes, says, *filter(None, [job.lengths.untold])]
    return Group(grid, *(Text(text, style="dim") for text in below))


def as_json(job: Job, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Equal for equal settings: nothing in it depends on the machine that simulates."""
    return {
        "settings": job.settings.model_dump(mode="json"),
        "batch_limit": job.batch_limit,
        "untold": "\n".join(filter(None, [job.costs.untold, job.lengths.untold])),
        "outcomes": [o.as_json() for o in outcomes],
    }
