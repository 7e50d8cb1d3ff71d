"""Sets of chunks, the pieces that they travel in, and how large a piece should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import WeightsError
from laminar.relay.chunks import ChunkSet, Piece, best_grain, broadcast_s, chunk_count, span

SIZE = 23
sets = st.sets(st.integers(0, SIZE - 1))
grains = st.integers(1, 8)


def chunk_set(members: set[int]) -> ChunkSet:
    result = ChunkSet(SIZE)
    for index in members:
        result.add(Piece(index, 1))
    return result


@given(sets)
def test_a_set_is_what_was_added(members: set[int]) -> None:
    chunks = chunk_set(members)
    assert set(chunks) == members and len(chunks) == len(members) and chunks.full == (len(members) == SIZE)
    assert set(chunks.complement()) == set(range(SIZE)) - members
    assert all((index in chunks) == (index in members) for index in range(SIZE))
    copy = chunks.copy()
    copy.add(Piece(0, SIZE))
    assert set(chunks) == members and copy.full


@given(sets)
def test_a_set_survives_the_wire(members: set[int]) -> None:
    chunks = chunk_set(members)
    assert ChunkSet.from_hex(chunks.to_hex(), SIZE) == chunks


@pytest.mark.parametrize("text", ["", "xyz", "-1", f"{1 << SIZE:x}"])
def test_nonsense_from_the_wire_is_no_set(text: str) -> None:
    with pytest.raises(WeightsError):
        ChunkSet.from_hex(text, SIZE)


@given(sets, grains)
def test_runs_are_aligned_and_complete(members: set[int], grain: int) -> None:
    pieces = list(chunk_set(members).runs(grain))
    assert [i for p in pieces for i in range(p.first, p.end)] == sorted(members)
    assert all(p.first // grain == (p.end - 1) // grain for p in pieces)


@given(sets, sets, grains)
def test_the_first_piece_is_the_first_whose_chunks_are_all_there(wanted: set[int], there: set[int], grain: int) -> None:
    pieces = [p for p in chunk_set(wanted).runs(grain) if set(range(p.first, p.end)) <= there]
    assert chunk_set(wanted).first_in(chunk_set(there), grain) == (pieces[0] if pieces else None)


@given(sets, grains, st.integers(1, 4))
def test_streams_share_a_set_without_overlap(members: set[int], grain: int, streams: int) -> None:
    shares = [set(chunk_set(members).every(streams, i, grain)) for i in range(streams)]
    assert set().union(*shares) == members and sum(map(len, shares)) == len(members)


def test_chunks_beyond_the_set_are_refused() -> None:
    for piece in (Piece(-1, 1), Piece(SIZE, 1), Piece(SIZE - 1, 2), Piece(3, 0)):
        with pytest.raises(WeightsError, match="not among"):
            ChunkSet(SIZE).add(piece)
    with pytest.raises(WeightsError, match=r"raise relay\.chunk_mib"):
        ChunkSet(2 << 20)


def test_the_last_chunk_is_shorter() -> None:
    assert chunk_count(1000, 256) == 4
    assert span(Piece(2, 2), 256, 1000) == (512, 1000)


def test_pieces_are_as_large_as_a_chain_gains_from() -> None:
    """k* = sqrt((p - 2) M b / s), within 1 and 64 MiB."""
    mib = 1 << 20
    usual = {"seconds_a_byte": 1e-9, "seconds_a_piece": 1e-3}
    assert best_grain(1 << 30, 2, mib, **usual) == 64, "nobody forwards"
    # 8 relays, 1 GiB: k* = sqrt(6 x 1.07 s / 1 ms) = 80 pieces of 12.8 MiB
    assert best_grain(1 << 30, 8, mib, **usual) == 13
    assert best_grain(1 << 20, 8, mib, **usual) == 1, "never below a chunk"
    assert best_grain(1 << 40, 8, mib, **usual) == 64


@given(st.integers(3, 64), st.integers(1 << 22, 1 << 34))
def test_the_best_grain_is_best(relays: int, total: int) -> None:
    rate, handling = 1e-9, 5e-4

    def cost(grain: int) -> float:
        pieces = chunk_count(total, grain << 20)
        return broadcast_s(total, relays, grain << 20, rate) + (relays + pieces - 2) * handling

    best = best_grain(total, relays, 1 << 20, seconds_a_byte=rate, seconds_a_piece=handling)
    assert all(cost(best) <= 1.1 * cost(grain) for grain in (1, 2, 4, 8, 16, 32, 64))
