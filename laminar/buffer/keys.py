"""Where each record lives in etcd. All keys of a run share `/laminar/<run>/<generation>/`.

A generation is one life of the etcd state: `laminar recover` starts a new one, so that workers of
the old life write to keys that nobody reads. Only `manifest`, which names the generation, `supervisor` and
`recovering` stand outside it.
"""

from __future__ import annotations

import re

from laminar.errors import ConfigError

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Keys:
    def __init__(self, run: str, generation: int = 1) -> None:
        if not RUN_NAME.fullmatch(run):
            raise ConfigError(
                f"run name {run!r} is not usable: 1 to 63 of a-z, 0-9, '.', '_', '-', first a letter or digit"
            )
        self.run = run
        self.generation = generation
        self.root = f"/laminar/{run}/"
        self.prefix = f"{self.root}g{generation}/"
        self.manifest = f"{self.root}manifest"
        self.supervisor = f"{self.root}supervisor"
        self.recovering = f"{self.root}recovering"
        self.cursor = f"{self.prefix}cursor"
        self.claims = f"{self.prefix}claims/"
        self.inbox_root = f"{self.prefix}inbox/"
        self.moves_root = f"{self.prefix}moves/"
        self.rests_root = f"{self.prefix}rests/"
        self.incoming_root = f"{self.prefix}incoming/"
        self.batches = f"{self.prefix}batches/"
        self.closings = f"{self.prefix}closings/"
        self.closed = f"{self.prefix}closed"
        self.heads = f"{self.prefix}tables/"
        self.trainer = f"{self.prefix}trainer"
        self.weights = f"{self.prefix}weights"
        self.offers = f"{self.prefix}offers/"
        self.evaluations = f"{self.prefix}evaluations/"
        self.evaluation_claims = f"{self.prefix}claims-eval/"
        self.retain = f"{self.prefix}retain"
        self.complete = f"{self.prefix}complete"
        self.chain = f"{self.prefix}chain"
        self.secret = f"{self.prefix}secret"
        self.workers_root = f"{self.prefix}workers/"
        self.loads_root = f"{self.prefix}load/"

    def worker(self, kind: str, worker: str) -> str:
        return f"{self.workers_root}{kind}/{worker}"

    def workers(self, kind: str) -> str:
        return f"{self.workers_root}{kind}/"

    def load(self, kind: str, worker: str) -> str:
        return f"{self.loads_root}{kind}/{worker}"

    def leader(self, role: str) -> str:
        return f"{self.prefix}leaders/{role}"

    def claim(self, group: int, sample: int) -> str:
        return f"{self.claims}{trajectory_name(group, sample)}"

    def inbox(self, worker: str) -> str:
        return f"{self.inbox_root}{worker}/"

    def inbox_item(self, worker: str, group: int, sample: int) -> str:
        return f"{self.inbox(worker)}{trajectory_name(group, sample)}"

    def moves(self, worker: str) -> str:
        return f"{self.moves_root}{worker}"

    def rest(self, worker: str) -> str:
        return f"{self.rests_root}{worker}"

    def incoming(self, table: str, segment: str) -> str:
        return f"{self.incoming_root}{table}/{segment}"

    def incoming_table(self, table: str) -> str:
        return f"{self.incoming_root}{table}/"

    def head(self, table: str) -> str:
        """The committed state of a table; `experience` for the experience."""
        return f"{self.heads}{table}"

    def offers_of(self, version: int) -> str:
        """Digests under which a version was made available again, after its publication (`publishing.Publisher`)."""
        return f"{self.offers}{version:012d}/"

    def batch(self, step: int) -> str:
        return f"{self.batches}{step_name(step)}"


def generation_of(key: str) -> int | None:
    """Of a key of any run; None for what stands outside the generations."""
    part = (key.split("/") + [""] * 4)[3]
    return int(part[1:]) if part[:1] == "g" and part[1:].isdecimal() else None


def step_name(step: int) -> str:
    return f"{step:012d}"


def trajectory_name(group: int, sample: int) -> str:
    """`000000000042-003`: zero-padded, so that etcd lists claims in the order of drawing."""
    return f"{group:012d}-{sample:03d}"


def parse_trajectory(name: str) -> tuple[int, int]:
    group, _, sample = name.rsplit("/", 1)[-1].partition("-")
    return int(group), int(sample)
