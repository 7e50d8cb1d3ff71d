"""Times during which a recorded run stood still, taken out of what it recorded. Pure.

A trajectory that is in flight when its run is stopped keeps its start and ends after the resume, so that the whole
stop looks like time that it took:

    recorded   ──a──┤ ├──b──┤ ├──────c───────▷ stopped, for hours ▷──────c──┤ ├──d──┤
    left       ──a──┤ ├──b──┤ ├──────c──────────c──┤ ├──d──┤

Nothing tells when a run is stopped. But while it works, something starts or ends again and again: a gap many times as
long as all that is in flight needs for its tokens is none of generation.
"""

from __future__ import annotations

import numpy as np

SLACK = 10.0
"""How many times as long as its tokens need a trajectory may take before it is asked whether the run stood still: more
than the seconds a token of a full batch are those of one alone."""
USUAL = 25
"""The percentile that is taken for usual: at a stop, most of what a short run has recorded may be in flight."""


def without_stops(
    began: np.ndarray, ended: np.ndarray, tokens: np.ndarray, signs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Starts and ends on a clock that stands still while the run did, and how many seconds it stood still. `tokens`: of
    each trajectory; `signs`: other moments in seconds at which the run was at work. No interval becomes empty."""
    times = np.unique(np.concatenate([began, ended, signs]))
    gaps = np.diff(times)
    if not len(gaps):
        return began, ended, 0.0
    seconds = ended - began
    usual_s = np.percentile(seconds, USUAL)
    needs_s = np.maximum(usual_s, tokens * np.percentile(seconds / np.maximum(tokens, 1), USUAL))
    kept = gaps.copy()
    for place in np.flatnonzero(gaps > SLACK * usual_s):
        flying = (began <= times[place]) & (ended >= times[place + 1])
        if flying.any() and gaps[place] > SLACK * needs_s[flying].max():
            kept[place] = np.median(gaps)
    clock = np.concatenate([[0.0], np.cumsum(kept)])
    places_began, places_ended = np.searchsorted(times, began), np.searchsorted(times, ended)
    return clock[places_began], clock[places_ended], float((gaps - kept).sum())
