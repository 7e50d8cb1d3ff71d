"""What the trainer takes in of the committed experience, and when it must not go on."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer.sampler import select, to_retire
from laminar.buffer.schema import EXPERIENCE
from laminar.buffer.table import MemoryTable
from laminar.clock import SystemClock
from laminar.config import config_from
from laminar.workers.training import intake
from laminar.workers.training.intake import Intake

GROUPS_A_STEP = 2


class Experience:
    """Groups of two that are committed one after another, and the trainer's look at them."""

    def __init__(self, no_signal: str) -> None:
        self.table = MemoryTable(EXPERIENCE)
        self.groups = 0
        trainer = {"groups_per_step": GROUPS_A_STEP, "no_signal": no_signal}
        config = config_from(
            {"model": {"path": "tiny"}, "sampling": {"samples_per_prompt": 2}, "trainer": trainer}
        )
        self.mode: Any = no_signal
        self.intake = Intake(config, self.table, SystemClock())

    async def commit(self, groups: int, rewards: tuple[float, float]) -> None:
        rows = [
            {name: None for name in EXPERIENCE.names}
            | {"group": g, "sample": s, "status": "ok", "reward": rewards[s], "commit_seq": 2 * g + s}
            for g in range(self.groups, self.groups + groups)
            for s in range(2)
        ]
        self.groups += groups
        target = await self.table.version() + 1
        await self.table.commit(pa.Table.from_pylist(rows, schema=EXPERIENCE), target=target, key=f"c{target}")
        await self.intake.scan()

    @property
    def waiting(self) -> int:
        assert select(self.intake.open, GROUPS_A_STEP, self.mode) is None
        return to_retire(self.intake.open, GROUPS_A_STEP, self.mode)


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BARREN_GROUPS", 40)
    monkeypatch.setattr(intake, "BARREN_STEPS", 20)


@pytest.mark.parametrize("no_signal", ["count", "replace"])
async def test_groups_that_never_have_a_signal_end_the_run_with_an_explanation(no_signal: str) -> None:
    """Case 43: every group has equal rewards, and dynamic sampling is on: bounded, with an explanation."""
    seen = Experience(no_signal)
    await seen.commit(2, (1.0, 1.0))
    assert seen.intake.barren(seen.waiting) == ""
    warnings = []
    for _ in range(9):
        await seen.commit(4, (0.0, 0.0))
        assert seen.intake.too_barren(seen.waiting) == ""
        warnings.append(seen.intake.barren(seen.waiting))
    assert all("all rewards are equal" in w for w in warnings) and warnings[0].startswith("4 groups")
    await seen.commit(2, (0.0, 0.0))
    assert "40 groups without a step" in seen.intake.too_barren(seen.waiting)
    assert "(limit 40)" in seen.intake.too_barren(seen.waiting)


async def test_a_few_steps_worth_of_groups_without_a_signal_are_told_long_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that draws and draws without a step must say why, not only after a thousand groups."""
    monkeypatch.setattr(intake, "BARREN_GROUPS", 1000)
    seen, first = Experience("count"), intake.WARN_STEPS * GROUPS_A_STEP
    await seen.commit(first - 1, (0.0, 0.0))
    assert seen.intake.barren(seen.waiting) == ""
    await seen.commit(1, (0.0, 0.0))
    told = seen.intake.barren(seen.waiting)
    assert told.startswith(f"{first} groups without a step")
    await seen.commit(50, (0.0, 0.0))
    assert seen.intake.barren(seen.waiting) == told
    await seen.commit(50, (0.0, 0.0))
    assert seen.intake.barren(seen.waiting).startswith("100 groups")


async def test_a_run_that_ended_so_is_judged_anew_when_it_is_tried_again() -> None:
    seen = Experience("replace")
    await seen.commit(40, (0.0, 0.0))
    seen.intake.forgive()
    await seen.commit(39, (1.0, 1.0))
    assert seen.intake.too_barren(seen.waiting) == ""
    await seen.commit(1, (1.0, 1.0))
    assert seen.intake.too_barren(seen.waiting)


async def test_a_rejected_group_is_replaced_by_a_later_one() -> None:
    """Case 16: the filter rejects one of four groups and the trainer waits for four: it gets them from later ones."""
    seen = Experience("replace")
    await seen.commit(1, (0.0, 1.0))
    await seen.commit(1, (1.0, 1.0))
    assert seen.waiting == 1, "admission lets one more be drawn"
    await seen.commit(1, (1.0, 0.0))
    selection = select(seen.intake.open, GROUPS_A_STEP, "replace")
    assert selection is not None
    assert (selection.trained, dict(selection.retired)) == ((0, 2), {1: "no_signal"})


async def test_lengths_count_from_the_trainers_first_look_on() -> None:
    """The first that end are the short ones: left out of the finished, they would be missed there alone. What was
    committed before this trainer came is not read again."""
    fresh, resumed = Experience("count"), Experience("count")
    await fresh.intake.scan()
    await fresh.commit(1, (0.0, 1.0))
    assert fresh.intake.lengths.consumed([])["length_finished_mean"] == 0.0
    await resumed.commit(1, (0.0, 1.0))
    assert resumed.intake.lengths.consumed([])["length_finished_mean"] is None
