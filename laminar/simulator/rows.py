"""What a committed row of a simulated run must look like: each token tells who wrote it, where, and why it is there.

prompt │ policy … STOP │ reply 1 │ policy … STOP │ reply 2 │ policy … STOP, CUT, or as much as it may
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from laminar.simulator.engine import CUT_TOKEN, STOP_TOKEN, logprob_of, token_at
from laminar.simulator.environment import tokens_of_reply

PREFIX = 16
"""Digits of a digest that a span has at least."""


@dataclass(frozen=True)
class Limits:
    """`max_tokens`: of the policy, in all turns of a trajectory; `model_len`: of all its tokens, prompt included."""

    max_tokens: int
    model_len: int


def check_row(row: Mapping[str, Any], limits: Limits, digests: Mapping[int, Set[str]]) -> list[str]:
    """All that is wrong with a trajectory. `digests`: what each version was published, recorded or offered under."""
    return [*_tokens(row), *_end(row, limits), *_writers(row), *_versions(row, digests)]


def _name(row: Mapping[str, Any]) -> str:
    return f"({row['group']}, {row['sample']})"


def _tokens(row: Mapping[str, Any]) -> list[str]:
    """Whether it is one contiguous sequence: no gap, no repeat, nothing after the end of a turn, each reply once."""
    tokens, first = row["token_ids"], len(row["prompt_ids"])
    turn = start = 0
    for mine, run in itertools.groupby(row["policy_mask"]):
        stop = start + len(list(run))
        if mine:
            ends = (STOP_TOKEN,) if stop < len(tokens) else (STOP_TOKEN, CUT_TOKEN, token_at(first + stop - 1))
            for i in range(start, stop):
                if tokens[i] not in (ends if i == stop - 1 else (token_at(first + i),)):
                    what = "a gap, a repeat, or an end inside a turn" if i < stop - 1 else "no end of a turn"
                    return [f"invariant 2: {_name(row)} has token {tokens[i]} at {i} of turn {turn}: {what}"]
        else:
            turn += 1
            if tokens[start:stop] != tokens_of_reply(turn):
                return [f"invariant 2: {_name(row)} has {tokens[start:stop]} at {start}, not reply {turn}"]
        start = stop
    if row["status"] == "ok" and row["turns"] != turn + 1:
        return [f"invariant 2: {_name(row)} has {turn} replies and {row['turns']} turns"]
    return []


def _end(row: Mapping[str, Any], limits: Limits) -> list[str]:
    """Whether a trajectory that is said to be finished is."""
    tokens = row["token_ids"]
    if row["status"] != "ok":
        return []
    if row["finish_reason"] == "length":
        full = sum(row["policy_mask"]) >= limits.max_tokens or len(row["prompt_ids"]) + len(tokens) >= limits.model_len
        finished = full or tokens[-1:] == [CUT_TOKEN]
    else:
        finished = tokens[-1:] == [STOP_TOKEN]
    if finished:
        return []
    return [f"invariant 2: {_name(row)} is finished by {row['finish_reason']!r} in the midst of a turn: {tokens[-1:]}"]


def _writers(row: Mapping[str, Any]) -> list[str]:
    """Whether each policy token was written by the weights that its span names."""
    spans = list(zip(row["span_start"], row["span_digest"], strict=True))
    for i, (mine, logprob) in enumerate(zip(row["policy_mask"], row["logprobs"], strict=True)):
        if mine:
            digest = next((d for start, d in reversed(spans) if start <= i), "")
            if not digest or logprob != logprob_of(digest):
                return [f"invariant 5: token {i} of {_name(row)} was not written by the weights {digest[:12]}"]
    return []


def _versions(row: Mapping[str, Any], digests: Mapping[int, Set[str]]) -> list[str]:
    """Whether each span names version and digest of the same weights."""
    for version, digest in zip(row["span_version"], row["span_digest"], strict=True):
        if digest[:PREFIX] not in digests.get(version, ()):
            return [f"invariant 5: {_name(row)} has a span of version {version} by {digest[:12]}, which it never was"]
    return []
