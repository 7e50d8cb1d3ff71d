"""Any history of trainers, living and replaced, leaves each step with one batch and each group consumed once."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from laminar.buffer.experience import Finished
from laminar.buffer.keys import Keys
from laminar.buffer.memory import Fault, MemoryEtcd
from laminar.buffer.partials import Partial
from laminar.buffer.records import BatchDecision, TrainerHead
from laminar.buffer.steps import BATCH, StepLog
from laminar.buffer.storage import MemoryStorage
from laminar.errors import Fenced, StoreError

KEYS = Keys("run")
Start = Callable[..., Awaitable[Any]]
FAULTS = st.lists(st.sampled_from([None, *Fault]), max_size=2)
WHO = st.integers(0, 3)


def batch(uses: dict[int, str]) -> pa.Table:
    partial = Partial([1, 2], [7], [True], [-0.25], [], 0, "scoring", None, "stop", 0)
    rows = [
        Finished(
            group=group, sample=sample, prompt_index=0, epoch=0, partial=partial, finish_reason="stop", status="ok",
            error="", reward=float(sample), reward_parts={}, text="", attempts=0, finished_at=0,
        ).row() | {"use": use}
        for group, use in uses.items() for sample in range(2)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=BATCH)


class Trainers(RuleBasedStateMachine):
    """Trainers that decide, record and end the run. The replaced ones go on acting, as if they had been paused; each
    believes what it saw of the head when it last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: Start) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=lambda: loop)
        self.start_actor = start
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.names = (f"t{n:03d}" for n in itertools.count())
        self.lives: list[tuple[Any, StepLog]] = []
        self.groups = itertools.count()
        self.seen: dict[int, str] = {}
        self.replace()

    def replace(self) -> None:
        actor = self.runner.run(self.start_actor(self.server, KEYS, next(self.names), "trainer"))
        self.lives.append((actor, StepLog(actor.coordination, KEYS, actor.ledger, self.storage)))

    def act(self, who: int, work: Callable[[StepLog], Awaitable[Any]], faults: list[Fault | None]) -> None:
        actor, steps = self.lives[-1 - who % len(self.lives)]
        actor.faults.script("transact", *faults)
        try:
            self.runner.run(work(steps))  # type: ignore[arg-type]
        except Fenced:
            assert not actor.alive
        except StoreError as error:
            refusals = ("cannot be decided", "changed under its leader", "holds another batch")
            assert any(refusal in str(error) for refusal in refusals), error
        actor.faults._script.clear()

    def head(self) -> TrainerHead | None:
        kv = self.server.get(KEYS.trainer)
        return TrainerHead.parse(kv.value) if kv else None

    @rule()
    def the_leader_dies_and_another_is_elected(self) -> None:
        self.lives[-1][0].kill()
        self.replace()

    @rule(who=WHO, retires=st.booleans(), faults=FAULTS)
    def decides(self, who: int, retires: bool, faults: list[Fault | None]) -> None:
        step = head.decided if (head := self.head()) else 0
        trained, retired = [next(self.groups)], ({next(self.groups): "no_signal"} if retires else {})
        rows = batch({**dict.fromkeys(trained, "train"), **retired})
        self.act(who, lambda steps: steps.decide(step, rows, trained, retired), faults)

    @rule(who=WHO, behind=st.integers(0, 2), faults=FAULTS)
    def records(self, who: int, behind: int, faults: list[Fault | None]) -> None:
        """Also a step that is recorded already, as after a restart."""
        head = self.head()
        if head is not None and (step := head.step - behind) in range(head.decided):
            self.act(who, lambda steps: steps.record(step, f"t{who}", [], {}, step + 1, "d", 0), faults)

    @rule(who=WHO, retires=st.booleans(), faults=FAULTS)
    def closes(self, who: int, retires: bool, faults: list[Fault | None]) -> None:
        retired = {next(self.groups): "remainder"} if retires else {}
        self.act(who, lambda steps: steps.close(batch(retired), retired, "ended"), faults)

    @invariant()
    def each_step_means_what_it_meant(self) -> None:
        for kv in self.server.page(KEYS.batches, "", 10_000, 0).items:
            step = int(kv.key.rsplit("/", 1)[-1])
            assert self.seen.setdefault(step, kv.value) == kv.value

    @invariant()
    def the_head_counts_what_is_decided(self) -> None:
        head = self.head()
        if head is None:
            return
        found = [
            BatchDecision.parse(kv.value)
            for prefix in (KEYS.batches, KEYS.closings)
            for kv in self.server.page(prefix, "", 10_000, 0).items
        ]
        consumed = Counter(g for d in found for g in (*d.trained, *d.retired))
        assert max(consumed.values(), default=1) == 1
        assert head.consumed_groups == len(consumed)
        assert head.decided == len(self.seen) and head.step <= head.decided

    def teardown(self) -> None:
        self.runner.close()


def test_any_history_of_trainers_decides_each_step_once(
    virtual_time: asyncio.AbstractEventLoopPolicy, start: Start
) -> None:
    run_state_machine_as_test(
        lambda: Trainers(virtual_time.new_event_loop(), start),
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
