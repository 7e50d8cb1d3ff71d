"""Sees every write to etcd while a simulated run goes on, and checks all invariants at its end.

Beside what `laminar audit` checks from the store, it knows what no store can say: which weights really wrote each
token, whether a trajectory that is said to be finished is, whether a decision was ever changed, whether a replay
trained the same weights again, whether somebody goes on with what he has handed over, and whether what nothing refers
to goes within bounded time. That it has seen everything is checked like the rest.
"""

from __future__ import annotations

import asyncio

from laminar.buffer.audit import Picture, check, gather
from laminar.buffer.claims import validate
from laminar.buffer.coordination import Change
from laminar.buffer.memory_server import Subscription
from laminar.buffer.records import Claim, WeightsHead
from laminar.errors import CoordinationError
from laminar.simulator.cluster import Cluster
from laminar.simulator.rows import PREFIX, Limits, check_row

CLEAN_WITHIN_S = 80.0
"""Within which a manager, which cleans each minute, has removed what nothing refers to."""


class Oracle:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.problems: list[str] = []
        self._seen = cluster.etcd.revision
        """The revision up to which every change was followed."""
        self._published: WeightsHead | None = None
        self._digests: dict[int, set[str]] = {}
        """What each version was published or offered under, as spans tell it."""
        self._decided: dict[str, str] = {}
        self._claims: dict[str, Claim] = {}
        self.moved = 0
        """Trajectories that a living owner handed to another."""
        self.interrupted = 0
        """Committed trajectories that span versions because weights changed under them."""
        self.rested = 0
        """Rollouts that were sent to rest."""
        self._given: dict[str, str] = {}
        """Who handed over each trajectory that was moved, by its name, as long as its new owner has it."""

    async def watch(self) -> None:
        """Follow every change of etcd, from before the first worker starts."""
        while True:
            subscription: Subscription = self.cluster.etcd.subscribe(self.cluster.keys.prefix, self._seen + 1)
            while (batch := await subscription.next()) is not None:
                for change in batch:
                    self._see(change)
                    self._seen = change.revision
                self._see_engines()

    def _see(self, change: Change) -> None:
        keys = self.cluster.keys
        if change.key.startswith(keys.claims):
            self._see_claim(change)
        if change.kv is None:
            return
        if change.key == keys.weights:
            self._see_weights(WeightsHead.parse(change.kv.value))
        elif change.key.startswith(keys.offers):
            version, _, digest = change.key[len(keys.offers) :].partition("/")
            self._digests.setdefault(int(version), set()).add(digest[:PREFIX])
        elif change.key.startswith(keys.rests_root):
            self.rested += 1
        elif change.key.startswith(keys.batches):
            before = self._decided.setdefault(change.key, change.kv.value)
            if before != change.kv.value:
                self.problems.append(f"invariant 4: {change.key} was decided twice: {before}, then {change.kv.value}")

    def _see_claim(self, change: Change) -> None:
        before, after = self._claims.pop(change.key, None), Claim.parse(change.kv.value) if change.kv else None
        if after is not None:
            self._claims[change.key] = after
        try:
            validate(before, after)
        except CoordinationError as e:
            self.problems.append(f"{change.key}: {e}")
        name = change.key.rsplit("/", 1)[-1]
        if after is None or before is None or after.owner != before.owner:
            self._given.pop(name, None)
        changed = before and after and before.owner and after.owner not in ("", before.owner)
        if before and after and changed and before.deaths == after.deaths:
            self.moved += 1
            self._given[name] = before.owner

    def _see_engines(self) -> None:
        """A move begins with the end of its source: never do two generate what was handed over alive."""
        for slot in self.cluster.living("rollout") if self._given else ():
            for request in slot.engine.requests if slot.engine is not None else ():
                name = "-".join(request.split("-")[:2])
                source = self._given.get(name)
                if source is not None and slot.process is not None and process_id(source) == slot.process.pid:
                    self.problems.append(f"{source} generates {name}, which it has handed over")
                    del self._given[name]

    def _see_weights(self, head: WeightsHead) -> None:
        before, self._published = self._published, head
        self._digests.setdefault(head.version, set()).add(head.digest[:PREFIX])
        if before is None:
            return
        if head.version < before.version:
            self.problems.append(f"invariant 5: version {head.version} was published after {before.version}")
        if head.version == before.version and head.digest != before.digest:
            self.problems.append(f"invariant 5: version {head.version} was published with two digests")

    async def judge(self) -> list[str]:
        """All problems, once the run has ended and everybody has left; only relays live, to clean up."""
        c = self.cluster
        picture, unseen = await self._picture()
        report = check(picture)
        problems = [*self.problems, *report.problems, *c.broken, *(f"untaken: {f}" for f in c.loop.faults)]
        if unseen:
            problems.append(unseen)
        if picture.left_over:
            problems.append(f"invariant 7: {len(picture.left_over)} are left over: {', '.join(picture.left_over[:5])}")
        for metrics in picture.metrics:
            self._digests.setdefault(metrics["version"], set()).add(metrics["digest"][:PREFIX])
        limits = Limits(c.config.sampling.max_tokens, c.config.rollout.max_model_len)
        for row in picture.experience:
            problems += check_row(row, limits, self._digests)
        if c.plan.update == "interrupt":
            self.interrupted = sum(len(set(row["span_version"])) > 1 for row in picture.experience)
        steps = sorted(m["step"] for m in picture.metrics if m["step"] >= 0)
        if steps != list(range(c.config.run.max_steps)):
            problems.append(f"steps recorded: {steps}, wanted {c.config.run.max_steps}")
        if picture.registered or picture.claims:
            problems.append(f"{len(picture.registered)} registered and {len(picture.claims)} claimed after the end")
        for version, states in sorted(c.states.items()):
            if len(states) > 1:
                problems.append(f"version {version} was trained to {len(states)} different weights")
        return problems

    async def _picture(self) -> tuple[Picture, str]:
        """What is left once a manager has cleaned up, or the time for it is over; whether some change was not seen."""
        c = self.cluster
        deadline = c.loop.now + CLEAN_WITHIN_S
        before = c.etcd.revision
        while c.loop.now < deadline:
            manager = c.etcd.get(c.keys.leader("manager"))
            if manager is not None and manager.create_revision > before:
                break
            await asyncio.sleep(0.5)
        while True:
            revision = c.etcd.revision
            await asyncio.sleep(1.0)
            picture = await gather(
                c.outside, c.keys, c.disk, c.tables, samples_per_prompt=c.config.sampling.samples_per_prompt,
                on_version_lost=c.config.rollout.on_version_lost, update=c.config.rollout.update,
            )  # fmt: skip
            if not picture.left_over or c.loop.now > deadline:
                late = f"the oracle saw etcd's changes up to {self._seen}, there were {revision}"
                return picture, late if self._seen < revision else ""


def process_id(worker: str) -> int:
    """Of a worker, from its id `kind-host-pid-random`."""
    return int(worker.split("-")[2])
