"""Arrow schemas of every table, in one place.

Column types are limited to int32, int64, float32, bool, string, timestamp[us] and lists of them:
DuckDB and Polars read those through a Lance data set; unsigned, dictionary, large and half-precision types they do not.
"""

from __future__ import annotations

import pyarrow as pa

FORMAT_VERSION = 1
TIMESTAMP = pa.timestamp("us", tz="UTC")


def _schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns])


PROMPTS = _schema(
    ("prompt_index", pa.int64()),
    ("prompt", pa.string()),
    ("answer", pa.string()),
    ("environment", pa.string()),
    ("metadata", pa.string()),
    ("source", pa.string()),
)

PARTIALS = _schema(
    ("group", pa.int64()),
    ("sample", pa.int32()),
    ("term", pa.int32()),
    ("turn", pa.int32()),
    ("offset", pa.int32()),
    ("role", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())),
    ("version", pa.int32()),
    ("digest", pa.string()),
    ("worker", pa.string()),
    ("finish_reason", pa.string()),
    ("turn_state", pa.string()),
    ("environment_state", pa.string()),
    ("started_at", TIMESTAMP),
    ("at", TIMESTAMP),
)

EXPERIENCE = _schema(
    ("group", pa.int64()),
    ("sample", pa.int32()),
    ("prompt_index", pa.int64()),
    ("epoch", pa.int32()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("token_ids", pa.list_(pa.int32())),
    ("policy_mask", pa.list_(pa.bool_())),
    ("logprobs", pa.list_(pa.float32())),
    ("span_start", pa.list_(pa.int32())),
    ("span_version", pa.list_(pa.int32())),
    ("span_worker", pa.list_(pa.string())),
    ("span_digest", pa.list_(pa.string())),
    ("version", pa.int32()),
    ("turns", pa.int32()),
    ("finish_reason", pa.string()),
    ("status", pa.string()),
    ("error", pa.string()),
    ("reward", pa.float32()),
    ("reward_parts", pa.string()),
    ("text", pa.string()),
    ("metadata", pa.string()),
    ("started_at", TIMESTAMP),
    ("finished_at", TIMESTAMP),
    ("attempts", pa.int32()),
    ("commit_seq", pa.int64()),
)
"""`prompt_ids` is the first prompt, `token_ids` everything after it; `version` is the oldest span's."""

STEPS = _schema(
    ("step", pa.int64()),
    ("group", pa.int64()),
    ("sample", pa.int32()),
    ("advantage", pa.float32()),
    ("staleness", pa.int32()),
    ("tokens", pa.int32()),
    ("mean_ratio", pa.float32()),
    ("clip_fraction", pa.float32()),
    ("policy_loss", pa.float32()),
    ("mean_logprob", pa.float32()),
    ("commit_seq", pa.int64()),
)

STEP_METRICS = _schema(
    ("step", pa.int64()),
    ("version", pa.int32()),
    ("digest", pa.string()),
    ("metrics", pa.string()),
    ("at", TIMESTAMP),
    ("commit_seq", pa.int64()),
)
"""`metrics` is a JSON object of number or null by name; `version` is the version that the step produced."""

EVALUATION = _schema(
    ("version", pa.int32()),
    ("mode", pa.string()),
    ("prompt_index", pa.int64()),
    ("sample", pa.int32()),
    ("token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),
    ("status", pa.string()),
    ("reward", pa.float32()),
    ("text", pa.string()),
    ("digest", pa.string()),
    ("at", TIMESTAMP),
    ("commit_seq", pa.int64()),
)

TABLES: dict[str, pa.Schema] = {
    "experience": EXPERIENCE,
    "steps": STEPS,
    "step_metrics": STEP_METRICS,
    "evaluation": EVALUATION,
}
"""Tables that the committer writes; `prompts` is written once, before a run starts."""
