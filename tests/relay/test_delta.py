"""Differences of versions: any bytes come out as they went in, real steps take a fraction, nonsense is refused."""

from __future__ import annotations

import itertools
import random
import struct

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.relay import delta
from laminar.relay.delta import HEAD, DeltaError, apply, encode
from laminar.relay.ways import LOOK_AGAIN, WayChoice


def through(base: bytes, new: bytes) -> int:
    """Bytes that the difference took; what it gives is compared."""
    encoded = encode(memoryview(base), memoryview(new), limit=1 << 40)
    assert encoded is not None
    target = bytearray(random.randbytes(len(new)))
    apply(memoryview(base), memoryview(target), encoded)
    assert bytes(target) == new
    return len(encoded)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_two_versions_of_equal_length(data: st.DataObject) -> None:
    base = data.draw(st.binary(max_size=300))
    new = bytearray(base)
    for _ in range(data.draw(st.integers(0, 5))):
        if new:
            new[data.draw(st.integers(0, len(new) - 1))] = data.draw(st.integers(0, 255))
    through(base, bytes(new))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.randoms(use_true_random=False))
def test_versions_that_have_nothing_in_common(base: bytes, chance: random.Random) -> None:
    through(base, chance.randbytes(len(base)))


def test_blocks_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes at and around the borders, and a last block that is shorter; odd lengths."""
    monkeypatch.setattr(delta, "BLOCK", 64)
    for length in (128, 127, 129, 2 * 64 * 3, 2 * 64 * 3 + 1, 2 * 64 * 3 + 63):
        base = random.Random(length).randbytes(length)
        for changed in ([0], [126, 127], [127, 128], [length - 1], list(range(length))):
            new = bytearray(base)
            for index in changed:
                if index < length:
                    new[index] ^= 0x81
            through(base, bytes(new))


def test_not_a_number_and_minus_zero_keep_their_bits() -> None:
    """As numbers they equal nothing or something else; here only bits count."""
    words = [0x7FC0, 0x7FC1, 0xFFC5, 0x8000, 0x0000, 0x7F80, 0xFF80]
    base = struct.pack("<7H", *words)
    for new in (words[1:] + words[:1], [0x8000] * 7, [0x0000] * 7, words):
        through(base, struct.pack("<7H", *new))
    assert through(base, base) < 60


def bf16(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("rate", "share"), [(1e-6, 0.05), (3e-4, 0.35)])
def test_two_steps_of_a_model_take_a_fraction_of_its_bytes(rate: float, share: float) -> None:
    """Weights of usual size under AdamW: at 1e-6 few bfloat16 words change at all."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    versions = []
    for _ in range(3):
        versions.append(b"".join(bf16(p) for p in model.parameters()))
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
    for base, new in itertools.pairwise(versions):
        assert base != new
        assert through(base, new) < share * len(new)


def test_what_is_not_worth_it_is_not_encoded() -> None:
    base, new = random.Random(1).randbytes(4096), random.Random(2).randbytes(4096)
    assert encode(memoryview(base), memoryview(new), limit=2048) is None
    assert encode(memoryview(base), memoryview(base), limit=2048) is not None
    assert encode(memoryview(base), memoryview(base), limit=10) is None


def test_nonsense_is_refused_or_gives_other_bytes_which_the_checksum_tells() -> None:
    """It is never written elsewhere, and memory is taken for what was asked for, not for what the sender says."""
    chance = random.Random(5)
    base = chance.randbytes(1001)
    new = bytearray(base)
    new[500:520] = chance.randbytes(20)
    good = encode(memoryview(base), memoryview(new), limit=1 << 20)
    assert good is not None
    refused = 0
    for _ in range(3000):
        damaged = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.2:
            damaged = damaged[: chance.randrange(len(damaged))]
        try:
            apply(memoryview(base), memoryview(bytearray(1001)), bytes(damaged))
        except DeltaError:
            refused += 1
    assert refused > 2000
    for count, bits, values in [(1 << 31, 5, 5), (3, 1 << 31, 0), (0, 0, 0)]:
        with pytest.raises(DeltaError):
            apply(memoryview(base), memoryview(bytearray(1001)), HEAD.pack(count, bits, values) + b"x" * 10)
    with pytest.raises(DeltaError, match="on a base of 1001"):
        apply(memoryview(base), memoryview(bytearray(1003)), good)


def test_the_faster_way_is_taken_and_the_other_looked_at_again() -> None:
    choice = WayChoice()
    assert choice.delta, "as soon as there is a base"
    choice.measured(1e9, delta=False)
    assert choice.delta
    choice.measured(1e6, delta=True)
    assert choice.delta, "the first one also waits for what computes it to be loaded"
    choice.measured(4e8, delta=True)
    asked = []
    for _ in range(2 * LOOK_AGAIN):
        asked.append(choice.delta)
        choice.measured(4e8 if choice.delta else 1e9, delta=choice.delta)
    assert asked.count(True) in (1, 2), "whole is faster here"
    for _ in range(3):
        choice.measured(3e9, delta=True)
    assert choice.delta, "the links became slower, or the steps smaller"


def test_a_large_piece_of_which_little_changed() -> None:
    words = numpy.arange(3 << 20, dtype="<u2")
    changed = words.copy()
    changed[:: 1 << 12] += 1
    assert through(words.tobytes(), changed.tobytes()) < 20_000
