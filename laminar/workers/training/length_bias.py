"""Whether what is trained on is as long as what is generated.

Long trajectories end late: a trainer that takes what is ready first sees the short ones of what was drawn together.
Nothing is dropped, so the long ones come in the end; how far the consumed lag behind is what the difference of two
means over equally many trajectories tells: the last that were finished, and the last that were consumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from laminar.workers.training.step_metrics import mean

REMEMBERED = 4096
"""Trajectories over which the means go."""


class LengthBias:
    """Counts from when its trainer started."""

    def __init__(self) -> None:
        self._finished: deque[int] = deque(maxlen=REMEMBERED)
        self._consumed: deque[int] = deque(maxlen=REMEMBERED)

    def finished(self, masks: pa.ChunkedArray) -> None:
        """`masks`: the column `policy_mask` of rows that were committed since the last call."""
        self._finished.extend(policy_tokens(masks))

    def consumed(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """The metrics of a step that consumed these rows: mean policy tokens of the last finished and of the last
        consumed trajectories, and by which share the consumed ones are longer (below 0: shorter). None without any."""
        self._consumed.extend(sum(row["policy_mask"]) for row in rows)
        finished, consumed = mean(self._finished), mean(self._consumed)
        bias = consumed / finished - 1 if finished and consumed is not None else None
        return {"length_finished_mean": finished, "length_consumed_mean": consumed, "length_bias": bias}


def policy_tokens(masks: pa.ChunkedArray) -> list[int]:
    """How many are true in each list of booleans; a null list has none."""
    if not len(masks):
        return []
    column = masks.combine_chunks()
    column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    true_before = np.concatenate([[0], np.cumsum(column.flatten().to_numpy(zero_copy_only=False))])
    ends = np.cumsum(lengths)
    counts: list[int] = (true_before[ends] - true_before[ends - lengths]).astype(int).tolist()
    return counts
