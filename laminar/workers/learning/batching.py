"""Packing the trajectories of a step into micro-batches under a budget of padded tokens. Pure.

A *block* is rows that share one prompt, computed once for all of them. A micro-batch of B blocks with N rows costs
B x (longest prompt) + N x (longest response) padded tokens. Without sharing each row is a block of its own, and the
same formula gives N x (prompt + response).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One trajectory to pack: lengths in tokens; rows of one `prompt` key have the same prompt."""

    index: int
    prompt: Hashable
    prompt_length: int
    response_length: int


@dataclass(frozen=True)
class Block:
    """`rows` (indexes) share a prompt of `prompt_length` tokens; their responses have `response_length` at most."""

    rows: tuple[int, ...]
    prompt_length: int
    response_length: int


@dataclass(frozen=True)
class MicroBatch:
    blocks: tuple[Block, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(row for block in self.blocks for row in block.rows)

    @property
    def padded_tokens(self) -> int:
        return _cost(self.blocks)


def pack(rows: Sequence[Row], *, budget: int, share_prompts: bool) -> list[MicroBatch]:
    """Micro-batches of at most `budget` padded tokens that hold each row exactly once; the same input, the same result.

    With `share_prompts` the rows of a prompt stay together, unless they alone exceed the budget: then the prompt is
    computed again for each part. A single row beyond the budget is a micro-batch of its own, since it cannot be cut.
    Blocks are placed longest first, so that padding is between neighbours of similar length.
    """
    blocks = [part for group in _groups(rows, share_prompts) for part in _split(group, budget)]
    blocks.sort(key=lambda b: (-b.response_length, -b.prompt_length, b.rows))
    batches: list[list[Block]] = []
    for block in blocks:
        if batches and _cost([*batches[-1], block]) <= budget:
            batches[-1].append(block)
        else:
            batches.append([block])
    return [MicroBatch(tuple(batch)) for batch in batches]


def _groups(rows: Sequence[Row], share_prompts: bool) -> list[list[Row]]:
    if not share_prompts:
        return [[row] for row in rows]
    together: dict[Hashable, list[Row]] = {}
    for row in rows:
        together.setdefault(row.prompt, []).append(row)
    return list(together.values())


def _split(rows: list[Row], budget: int) -> list[Block]:
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda r: (-r.response_length, r.index)):
        if parts and _cost([_block([*parts[-1], row])]) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [_block(part) for part in parts]


def _block(rows: list[Row]) -> Block:
    ordered = sorted(rows, key=lambda r: r.index)
    return Block(tuple(r.index for r in ordered), ordered[0].prompt_length, max(r.response_length for r in ordered))


def _cost(blocks: Sequence[Block]) -> int:
    count = sum(len(block.rows) for block in blocks)
    return len(blocks) * max(b.prompt_length for b in blocks) + count * max(b.response_length for b in blocks)
