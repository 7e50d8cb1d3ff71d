"""Does anything grow? Thousands of tiny steps through the real store and a real etcd, without engine or learner.

    python benchmarks/soak.py --steps 10000

In one process: two rollouts draw, stream partial responses and finish; a committer commits all four tables and compacts
them; a trainer decides, records, checkpoints and asks for evaluations; a manager sweeps and cleans; the embedded etcd
is looked after as `laminar run` does. Now and then a rollout dies with claims, a log and a segment that was never
registered, and trainer and committer are replaced. A step takes a fraction of a second instead of many, so what goes by
the clock goes by steps here: cleaning every 50, etcd's compaction every 300. (By the clock, a faster machine keeps more
history, and a busy one that becomes quiet seems to grow.)

It prints a table and a verdict for each measure, from the slope of its peaks over the second half (what is cleaned up
now and then is a saw): what the run has to keep (its rows, and a line a step in the archive of decisions) grows with it
and is shown apart. Ends with an audit, and with 1 if something grows or the audit finds a problem.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from laminar.buffer.audit import check, gather
from laminar.buffer.claims import Held
from laminar.buffer.commits import COMPACT_EVERY, TableCommitter
from laminar.buffer.coordination import Delete, Put, Transaction, created_at
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.experience import Finished, incoming_path, write_incoming
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger, all_claims
from laminar.buffer.local_files import LocalStorage
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.partials import Partial, PartialLog, PartialRow, Span
from laminar.buffer.records import EvaluationRequest, Incoming, Load, WeightsHead, WorkerRecord
from laminar.buffer.sampler import OpenGroups, Outcome, Selection, select
from laminar.buffer.schema import EVALUATION, TABLES
from laminar.buffer.segments import encode
from laminar.buffer.session import Election, Membership, Session
from laminar.buffer.steps import StepLog, batch_rows
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.workers.context import Member, Run
from laminar.workers.manager import Manager
from laminar.workers.supervisor.etcd_process import EtcdProcess
from laminar.workers.supervisor.etcd_upkeep import Upkeep
from laminar.workers.tables import open_table

KEYS = Keys("soak")
SAMPLES, TOKENS = 2, 16
LEASE_S = 600.0
"""Deaths are made here, not by a machine that is too busy to refresh a lease."""
CLEAN_EVERY, CHECKPOINT_EVERY, KEEP_CHECKPOINTS, EVALUATE_EVERY = 50, 10, 2, 4
HISTORY_EVERY = 300
ROLLOUT_DIES_EVERY, TRAINER_DIES_EVERY, COMMITTER_DIES_EVERY = 150, 700, 450
COMMIT_RECORDS_EVERY = 4
"""What a committer that gathers for a moment finds in one go, of steps this short."""
SAMPLE_EVERY = 50
"""Steps between two measurements, right after the cleaning."""
PEAK_OF = 20
"""Measurements of which the highest counts: 1,000 steps, two teeth of the saw that blocks of decisions make."""
LIMIT = 0.1
"""Growth over the second half, as a share of its mean, up to which a measure counts as flat."""
KEPT = ("rows (MB)", "archive (kB)")
"""What grows with the run by design."""


@dataclass
class Member2Ledger:
    """A leader: its membership, and a ledger under its leadership."""

    member: Member
    ledger: Ledger


@dataclass
class Soak:
    root: Path
    steps: int
    compact_every: int = COMPACT_EVERY
    checkpoint_every: int = CHECKPOINT_EVERY
    out: Path | None = None
    source: random.Random = field(default_factory=lambda: random.Random(0))
    lives: int = 0
    evaluations: int = 0
    samples: list[dict[str, float]] = field(default_factory=list)

    # -- a run's parts ------------------------------------------------------------------------------------------

    async def open(self, endpoint: str) -> None:
        self.storage = LocalStorage(self.root / "store")
        self.coordination = EtcdCoordination([endpoint])
        self.config = Config.model_validate({"model": {"path": "none"}, "run": {"max_steps": self.steps}})
        prints = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")
        self.file = RunFile(
            run="soak", created_at_us=0, config={}, model_folder="", prompts=1_000_000, held_out=0, fingerprints=prints
        )
        self.run = Run(self.coordination, KEYS, self.storage, self.file, self.config, SystemClock())
        self.tables = {name: open_table(self.storage, name) for name in TABLES}
        self.open_groups, self.scanned = OpenGroups(SAMPLES), -1
        relay = await self.member("relay")
        self.manager = Manager(self.run, relay, (await self.elected(relay, "manager")).ledger.actor)  # type: ignore[arg-type]
        self.rollouts = [await self.rollout(), await self.rollout()]
        await self.new_committer()
        await self.new_trainer()
        await self.publish(0)
        await self.log.record_initial(self.trainer.member.id, digest_of(0), self.run.clock.now_us())

    async def member(self, kind: str) -> Member:
        self.lives += 1
        name = f"{kind}-soak-1-{self.lives:06d}"
        session = await Session.open(self.coordination, LEASE_S)
        record = WorkerRecord(kind=kind, id=name, host="soak", pid=1, started_at_us=self.run.clock.now_us())
        membership = await Membership.join(session, self.coordination, KEYS, record)
        return Member(self.run, name, session, membership, Ledger(self.coordination, KEYS, name, membership))

    async def elected(self, member: Member, role: str) -> Member2Ledger:
        leadership = await Election(self.coordination, member.session, KEYS.leader(role), member.id).campaign()
        return Member2Ledger(member, Ledger(self.coordination, KEYS, member.id, leadership))

    async def rollout(self) -> tuple[Member, PartialLog]:
        member = await self.member("rollout")
        load = Load(
            version=0, running=0, waiting=0, kv_tokens=0, kv_capacity=1, decode_tokens_per_s=0, draining=False
        )
        await self.coordination.put(KEYS.load("rollout", member.id), load.dump(), lease=member.session.lease)
        return member, PartialLog(self.storage, member.id, sync=False, rotate_bytes=64 << 10)

    async def new_committer(self) -> None:
        self.committer = await self.elected(await self.member("committer"), "committer")
        self.committers = [
            TableCommitter(
                name, schema, self.tables[name], self.coordination, KEYS, self.committer.ledger, self.storage,
                compact_every=self.compact_every,
            )
            for name, schema in TABLES.items()
        ]  # fmt: skip

    async def new_trainer(self) -> None:
        self.trainer = await self.elected(await self.member("trainer"), "trainer")
        self.log = StepLog(self.coordination, KEYS, self.trainer.ledger, self.storage)

    async def publish(self, version: int) -> None:
        head = WeightsHead(version=version, digest=digest_of(version), layout_digest="l", bytes=1, master="")
        await self.coordination.put(KEYS.weights, head.dump())

    # -- a step -------------------------------------------------------------------------------------------------

    async def step(self, n: int) -> None:
        while (selection := await self.selection()) is None:
            member, log = self.rollouts[n % 2]
            held = await member.ledger.draw(groups=lambda _: 1, samples_per_prompt=SAMPLES, version=n)
            await self.generate(member, log, held, n)
            await self.commit()
        rows = await batch_rows(self.tables["experience"], uses_of(selection))
        await self.log.decide(n, rows, selection.trained, dict(selection.retired))
        self.open_groups.consume(uses_of(selection))
        await self.publish(n + 1)
        request = EvaluationRequest(version=n + 1, digest=digest_of(n + 1))
        asked = [Put(f"{KEYS.evaluations}{n + 1:09d}", request.dump())] if (n + 1) % EVALUATE_EVERY == 0 else []
        steps = [step_row(n, group, sample) for group in selection.trained for sample in range(SAMPLES)]
        await self.log.record(
            n, self.trainer.member.id, steps, {"loss": 0.5}, n + 1, digest_of(n + 1), self.run.clock.now_us(), asked
        )
        if asked:
            await self.evaluate(request)
        if (n + 1) % self.checkpoint_every == 0:
            await self.checkpoint(n + 1)
        if (n + 1) % COMMIT_RECORDS_EVERY == 0:
            await self.commit(list(TABLES))
        await self.mishaps(n)

    async def selection(self) -> Selection | None:
        columns = ["group", "sample", "status", "reward", "commit_seq"]
        rows = (await self.tables["experience"].scan_since(self.scanned, columns)).to_pylist()
        self.scanned = max((r["commit_seq"] for r in rows), default=self.scanned)
        self.open_groups.add(Outcome(r["group"], r["sample"], r["status"], r["reward"], r["commit_seq"]) for r in rows)
        return select(self.open_groups, 1, "count")

    async def generate(self, member: Member, log: PartialLog, held: list[Held], version: int) -> None:
        """Each trajectory is streamed, then finished; one group in ten has equal rewards."""
        now = self.run.clock.now_us()
        await log.append([row for h in held for row in partial_rows(h, member.id, version, now)])
        if log.due_for_rotation():
            await log.rotate([])
            await log.discard_superseded()
        segment = f"{member.id}-{held[0].id[0]:09d}"
        finished = [self.finished(h, member.id, version, now) for h in held]
        incoming = await write_incoming(self.storage, member.id, segment, finished)
        if await member.ledger.finish(held, segment, incoming):
            raise RuntimeError(f"{segment} could not be finished")

    def finished(self, held: Held, worker: str, version: int, now: int) -> Finished:
        group, sample = held.id
        spans = [Span(0, version, worker, digest_of(version)[:16])]
        tokens = [self.source.randrange(50_000) for _ in range(TOKENS)]
        partial = Partial(
            [1, 2], tokens, [True] * TOKENS, [-self.source.random() for _ in tokens], spans, 0, "scoring", None, "stop",
            now,
        )  # fmt: skip
        return Finished(
            group=group, sample=sample, prompt_index=group, epoch=0, partial=partial, finish_reason="stop", status="ok",
            error="", reward=0.0 if group % 10 == 9 else float(sample), reward_parts={}, text="text", attempts=0,
            finished_at=now,
        )  # fmt: skip

    async def commit(self, tables: Sequence[str] = ("experience",)) -> None:
        for committer in self.committers:
            if committer.name in tables:
                await committer.run_once()

    async def checkpoint(self, version: int) -> None:
        """As `checkpoints.py` leaves them: a folder with a mark; the oldest ones go."""
        folder = "checkpoints/step-"
        await self.storage.write(f"{folder}{version:09d}/trainer/state", b"x" * 1000)
        await self.storage.write(f"{folder}{version:09d}/checkpoint.json", b"{}")
        await self.log.change_head(checkpoint=version)
        await self.storage.delete_tree(f"{folder}{version - KEEP_CHECKPOINTS * self.checkpoint_every:09d}")

    async def evaluate(self, request: EvaluationRequest) -> None:
        member, _ = self.rollouts[0]
        rows = [
            {
                "version": request.version, "mode": "greedy", "prompt_index": i, "sample": 0, "token_ids": [1, 2],
                "finish_reason": "stop", "status": "ok", "reward": 1.0, "text": "t", "digest": request.digest,
                "at": self.run.clock.now_us(), "commit_seq": -1,
            }
            for i in range(4)
        ]  # fmt: skip
        path = incoming_path("evaluation", f"{member.id}-{request.version}")
        batch = pa.RecordBatch.from_pylist(rows, schema=EVALUATION)
        await self.storage.write(path, encode(EVALUATION, [batch]))
        kv = await self.coordination.get(f"{KEYS.evaluations}{request.version:09d}")
        if kv is None:
            raise RuntimeError(f"the request to evaluate version {request.version} is not there")
        done = Transaction((created_at(kv.key, kv.create_revision),), (Delete(kv.key),))
        incoming = Incoming(table="evaluation", path=path, rows=len(rows), worker=member.id)
        if not await member.ledger.register("evaluation", f"eval-{request.version:09d}", incoming, done):
            raise RuntimeError(f"the evaluation of version {request.version} could not be registered")

    # -- mishaps ------------------------------------------------------------------------------------------------

    async def mishaps(self, n: int) -> None:
        if (n + 1) % ROLLOUT_DIES_EVERY == 0:
            await self.rollout_dies(n)
        if (n + 1) % TRAINER_DIES_EVERY == 0:
            await self.storage.write(f"batches/{n + 1:09d}-{self.trainer.member.id}.arrow", b"never decided")
            await self.trainer.member.session.close()
            await self.new_trainer()
        if (n + 1) % COMMITTER_DIES_EVERY == 0:
            await self.committer.member.session.close()
            await self.new_committer()

    async def rollout_dies(self, n: int) -> None:
        """It leaves claims, a log, a segment that nobody registered, and a letter in its inbox; the manager gives its
        claims to the other, which goes on and finishes."""
        member, log = self.rollouts[0]
        version, key = n + 1, KEYS.worker("rollout", self.rollouts[0][0].id)
        held = await member.ledger.draw(groups=lambda _: 1, samples_per_prompt=SAMPLES, version=version)
        now = self.run.clock.now_us()
        await log.append([row for h in held for row in partial_rows(h, member.id, version, now)])
        await write_incoming(
            self.storage, member.id, f"{member.id}-late", [self.finished(h, member.id, version, now) for h in held]
        )
        await self.coordination.put(KEYS.inbox_item(member.id, 10**9, 0), "1")
        await member.session.close()
        self.rollouts = [self.rollouts[1], await self.rollout()]
        if not await self.manager.rollouts.wait_for(lambda: key not in self.manager.rollouts.items, 30):
            raise RuntimeError(f"the manager has not noticed in 30 s that {key} is gone")
        await self.manager.sweep()
        for held_now in (await all_claims(self.coordination, KEYS)).values():
            heir, log = next(r for r in self.rollouts if r[0].id == held_now.claim.owner)
            await log.append(partial_rows(held_now, heir.id, version, now))
            adopted = await heir.ledger.adopt(held_now, version=version, progress=TOKENS)
            if adopted is None:
                raise RuntimeError(f"{held_now.kv.key} could not be adopted")
            segment = f"{heir.id}-adopted-{held_now.id[0]:09d}-{held_now.id[1]}"
            finished = [self.finished(adopted, heir.id, version, now)]
            incoming = await write_incoming(self.storage, heir.id, segment, finished)
            if await heir.ledger.finish([adopted], segment, incoming):
                raise RuntimeError(f"{segment} could not be finished")
        await self.commit()

    # -- measuring ----------------------------------------------------------------------------------------------

    async def measure(self, step: int) -> dict[str, float]:
        files = [f for f in await self.storage.list("") if not f.path.startswith("checkpoints/")]
        data = [f for f in files if ".lance/data/" in f.path]
        archive = [f for f in files if f.path.endswith(".jsonl")]
        status = await self.coordination.status()
        rest = sum(f.size for f in files) - sum(f.size for f in (*data, *archive))
        return {
            "step": step,
            "files": len(files),
            "other bytes (MB)": rest / 1e6,
            "Lance versions": sum("_versions/" in f.path for f in files),
            "etcd keys": len((await self.coordination.range("/")).items),
            "etcd file (MB)": int(status["db_size"]) / 1e6,
            "etcd in use (MB)": int(status["in_use"]) / 1e6,
            "memory (MB)": resident_mb(),
            "rows (MB)": sum(f.size for f in data) / 1e6,
            "archive (kB)": sum(f.size for f in archive) / 1e3,
        }

    async def audit(self) -> list[str]:
        picture = await gather(
            self.coordination, KEYS, self.storage, self.tables, samples_per_prompt=SAMPLES, on_version_lost="continue"
        )
        return check(picture).problems

    async def work(self, upkeep: Upkeep, show_every: int) -> None:
        before = time.monotonic()
        async with self.manager.rollouts, self.manager.loads:
            for n in range(self.steps):
                await self.step(n)
                if (n + 1) % CLEAN_EVERY == 0:
                    await self.manager.cleaner.clean()
                    await upkeep.look()
                if (n + 1) % HISTORY_EVERY == 0:
                    await self.coordination.compact(int((await self.coordination.status())["revision"]))
                if (n + 1) % SAMPLE_EVERY == 0:
                    self.samples.append(await self.measure(n + 1))
                    if self.out is not None:
                        with self.out.open("a") as out:
                            out.write(json.dumps(self.samples[-1]) + "\n")
                if (n + 1) % show_every == 0:
                    now = time.monotonic()
                    show(self.samples[-1], (now - before) / show_every, header=n + 1 == show_every)
                    before = now


def uses_of(selection: Selection) -> dict[int, str]:
    return {**dict.fromkeys(selection.trained, "train"), **selection.retired}


def digest_of(version: int) -> str:
    return hashlib.sha256(str(version).encode()).hexdigest()


def partial_rows(held: Held, worker: str, version: int, now: int) -> list[PartialRow]:
    (group, sample), term = held.id, held.claim.term
    digest, tokens = digest_of(version)[:16], list(range(TOKENS))
    return [
        PartialRow(
            group, sample, term, 0, 0, "prompt", [1, 2], [], version, digest, worker, None, "generating", None, now, now
        ),
        PartialRow(
            group, sample, term, 0, 0, "policy", tokens, [-0.5] * TOKENS, version, digest, worker, "stop", "scoring",
            None, now, now,
        ),
    ]  # fmt: skip


def step_row(step: int, group: int, sample: int) -> dict[str, Any]:
    return {
        "step": step, "group": group, "sample": sample, "advantage": 0.5, "staleness": 0, "tokens": TOKENS,
        "mean_ratio": 1.0, "clip_fraction": 0.0, "policy_loss": 0.1, "mean_logprob": -0.5, "commit_seq": -1,
    }  # fmt: skip


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def show(sample: dict[str, float], seconds: float, *, header: bool) -> None:
    if header:
        print("  ".join(sample) + "  s/step")
    cells = [f"{value:{len(name)}.{0 if value == int(value) else 1}f}" for name, value in sample.items()]
    print("  ".join(cells) + f"  {seconds:6.3f}", flush=True)


def growth(samples: list[dict[str, float]], name: str) -> float:
    """What a line through the peaks of the second half rises over it, as a share of their mean; 0 if none is above the
    first half's highest. Of few samples each is a peak."""
    middle = len(samples) // 2
    half = samples[middle:]
    each = PEAK_OF if len(half) >= 3 * PEAK_OF else 1
    peaks = [max(s[name] for s in half[i : i + each]) for i in range(len(half) % each, len(half), each)]
    mean = statistics.fmean(peaks)
    if len(peaks) < 2 or not mean or max(peaks) <= max((s[name] for s in samples[:middle]), default=0.0):
        return 0.0
    return statistics.linear_regression(range(len(peaks)), peaks).slope * (len(peaks) - 1) / mean


def verdicts(samples: list[dict[str, float]]) -> dict[str, str]:
    """Flat or growing, for each measure but the step."""
    result = {}
    for name in list(samples[0])[1:]:
        share = growth(samples, name)
        word = "kept by design" if name in KEPT else "flat" if share < LIMIT else "GROWING"
        result[name] = f"{word} ({share:+.1%} over the second half)"
    return result


async def soak(
    root: Path, steps: int, *, show_every: int, compact_every: int = COMPACT_EVERY, out: Path | None = None
) -> tuple[list[dict[str, float]], list[str]]:
    """Measures, and the problems that the audit found."""
    etcd = EtcdProcess(root / "etcd" / "data", flags=("--auto-compaction-retention", "0"))
    await etcd.start()
    work = Soak(root, steps, compact_every, out=out)
    try:
        await work.open(etcd.endpoint)
        keeper = EtcdCoordination([etcd.endpoint])
        await work.work(Upkeep(keeper, etcd.quota_bytes, SystemClock(), print), show_every)
        problems = await work.audit()
        await keeper.close()
        for member in [r[0] for r in work.rollouts] + [work.trainer.member, work.committer.member, work.manager.member]:
            await member.session.close()
        await work.coordination.close()
        return work.samples, problems
    finally:
        await etcd.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", default="", help="where the store goes; a temporary folder by default")
    parser.add_argument("--out", type=Path, help="append each measurement to this file, one JSON object a line")
    parser.add_argument("--report", type=Path, help="print the verdicts of such a file, also of a run under way")
    arguments = parser.parse_args()
    if arguments.report:
        samples = [json.loads(line) for line in arguments.report.read_text().splitlines()]
        return conclude(samples, None)
    with tempfile.TemporaryDirectory(dir=arguments.folder or None, prefix="laminar-soak-") as folder:
        samples, problems = asyncio.run(
            soak(
                Path(folder), arguments.steps, show_every=max(SAMPLE_EVERY, arguments.steps // 10), out=arguments.out
            )
        )
    return conclude(samples, problems)


def conclude(samples: list[dict[str, float]], problems: list[str] | None) -> int:
    """Print the verdicts; 1 if something grows or the audit (None: there was none) found problems."""
    print()
    found = verdicts(samples)
    for name, verdict in found.items():
        print(f"{name:18} {verdict}")
    if problems is not None:
        print("audit              " + ("all invariants hold" if not problems else "; ".join(problems)))
    return 1 if problems or any("GROWING" in verdict for verdict in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
