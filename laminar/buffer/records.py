"""The values in etcd: small JSON records with a fixed schema each, readable with `etcdctl get`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from laminar.errors import CoordinationError


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def dump(self) -> str:
        return self.model_dump_json()

    @classmethod
    def parse(cls, value: str) -> Self:
        """Raises CoordinationError naming the record and what is wrong with it."""
        try:
            return cls.model_validate_json(value)
        except ValidationError as e:
            raise CoordinationError(f"a {cls.__name__} record in etcd is unreadable: {e}; value {value[:200]!r}") from e


class Source(Record):
    """Whose log holds a trajectory's durable rows, and under which term they were written."""

    worker: str
    term: int


ClaimState = Literal["generating", "scoring", "waiting"]


class Claim(Record):
    """The right of one worker to generate one trajectory (see `claims.py` for its life)."""

    owner: str
    """Worker id; empty while nobody owns it (`waiting` for the manager)."""
    term: int
    version: int
    state: ClaimState
    source: Source
    """Set by the first owner and by each one that has copied the rows; a log without rows of it means: nothing yet."""
    progress: int = 0
    """Durable tokens when the source was last set: more of them at the next change of owner forgive the deaths."""
    attempts: int = 0
    deaths: int = 0
    last_error: str = ""


class Cursor(Record):
    next: int
    by: str
    """Unique to the draw that wrote it: lets its writer recognise a commit whose reply was lost."""


class WorkerRecord(Record):
    kind: str
    id: str
    host: str
    pid: int
    endpoint: str = ""
    started_at_us: int
    links: dict[str, str] = {}
    """Relays only: where other relays reach this one, by name of the transport (`tcp`: HOST:PORT)."""
    rack: str = ""
    """Relays only: a label; relays of one rack are neighbours in the chain."""


class SupervisorRecord(Record):
    """The `laminar run` that works on a run. `place` and `began` tell on its host whether that process still lives."""

    host: str
    pid: int
    place: str
    began: str
    started_at_us: int


class LeaderRecord(Record):
    worker: str


class Load(Record):
    """What a rollout reports of itself (`load/rollout/<id>`). Counts are since this worker started."""

    version: int
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    decode_tokens_per_s: float
    draining: bool
    finished: int = 0
    batch_limit: int = 0
    """The batch at which a decode step takes 1.5 times that of one trajectory, or the engine's limit; 0: unknown."""
    step_s: float = 0.0
    """Seconds of a decode step with one trajectory, as measured; 0: unknown."""
    prefill_tokens_per_s: float = 0.0
    """As measured; 0: unknown."""
    acting: int = 0
    """Trajectories that wait for their environment."""
    evaluating: bool = False
    resting: bool = False
    switching: bool = False
    """About to load another version, or to leave: what came to its inbox from now on would find it gone."""
    tail: dict[str, tuple[int, int]] = {}
    """While it drains with at most `batch_limit` trajectories: of each that generates, by name, its tokens and how many
    more are to be expected."""
    moved_out: int = 0
    """Trajectories handed to others by repack, still unfinished."""
    moved_in: int = 0
    refilled_tokens: int = 0
    """Tokens prefilled again for trajectories that came from others."""


class Move(Record):
    """One trajectory of a plan, by name, and the worker that is to go on with it."""

    trajectory: str
    target: str


class Moves(Record):
    """`moves/<worker>`: hand these over, until the key is deleted. Each hand-over compares this key, so that a plan
    whose key is gone moves nothing any more."""

    plan: str
    version: int
    deadline_us: int
    """UTC by the clock of the manager, which deletes the key then; for the eye."""
    seconds: float
    """How long the plan holds from when the source first sees it."""
    items: list[Move]
    targets: dict[str, int]
    """The create_revision of each target's worker key."""


class Rest(Record):
    """`rests/<worker>`: draw nothing, hand everything over: this rollout is much slower than others of its kind."""

    reason: str
    until_us: int
    """UTC by the clock of the manager, which deletes the key then; for the eye."""


class RelayHop(Record):
    """One transfer into a relay. `received`: bytes on the way, fewer than `bytes` where differences came. `seconds`
    from the first request for chunks, `lag_s` from when this relay heard of the version to when it held it; `repairs`:
    who was lost, who went on, and the seconds between."""

    version: int
    peers: list[str]
    bytes: int
    received: int
    seconds: float
    lag_s: float
    piece_bytes: int
    repairs: list[str] = []


class RelayLoad(Record):
    """What a relay reports of itself (`load/relay/<id>`). `held`: digest by version; `arriving`: what it receives."""

    epoch: int
    held: dict[int, str]
    arriving: str = ""
    hop: RelayHop | None = None
    """The last transfer into this relay; none yet, or the trainer publishes here."""
    repairs: int = 0
    """Since this relay started."""
    refusals: int = 0
    """Connections of strangers, or that broke the protocol."""
    errors: list[str] = []
    """The last ones, shortened."""


class TrainerProgress(Record):
    """What the trainer reports of itself (`load/trainer/<id>`), for displays; metrics by name."""

    step: int
    activity: str
    metrics: dict[str, float | None]
    rewards: dict[int, float | None] = {}
    """Mean reward of each of the last ten steps that this trainer has trained; `metrics` are those of the newest."""
    warnings: list[str] = []
    """What the user should know of the run as it is now, a sentence each."""


class Incoming(Record):
    """A durable segment of finished rows that the committer has not committed yet."""

    table: str
    path: str
    rows: int
    worker: str
    trajectories: list[str] = []
    """Names of the trajectories in it (experience only), so that none is lost if the segment turns out unreadable."""


class Intent(Record):
    """A commit that was announced: Lance version `target`, transaction key `key`, these incoming segment ids."""

    target: int
    key: str
    segments: list[str]


class TableHead(Record):
    lance_version: int
    rows: int
    committing: Intent | None = None
    compacted: int = 0
    """The version that the last compaction made."""


class BatchDecision(Record):
    """What step `step` means, for ever. `retired` maps group to its reason: no_signal, error, remainder."""

    step: int
    file: str
    sha256: str
    trained: list[int]
    retired: dict[int, str]
    decided_by: str
    settings: dict[str, Any] = {}
    """What of the config shapes the optimizer step (learning rate, clipping, …), by the config's keys: a resume may
    change the config, and the step is trained again as it was."""


class TrainerHead(Record):
    """`decided` batches exist, `step` of them are trained and recorded; `checkpoint` is the newest one's version."""

    # Raised with a decision only. `to_retire` counts complete groups that can never be trained on (no signal, error)
    # and wait for the next decision: admission counts them as consumed, else the last steps could starve.

    step: int
    decided: int
    checkpoint: int
    consumed_groups: int
    to_retire: int = 0
    state: Literal["running", "done", "failed"]
    initial: bool = False
    """Version 0 has its row in `step_metrics`."""
    reason: str = ""
    by: str = ""
    """Unique to the change that wrote it: lets its writer recognise a commit whose reply was lost, and no other's."""


class WeightsHead(Record):
    version: int
    digest: str
    layout_digest: str
    bytes: int
    master: str


class ChainRecord(Record):
    """The order of the living relays, as the manager planned it; `epoch` grows by one at each change."""

    epoch: int
    order: list[str]


class EvaluationRequest(Record):
    """`evaluations/<version>`: evaluate this version on the held-out prompts; deleted when its rows are registered."""

    version: int
    digest: str


class Retain(Record):
    """Versions that claims still refer to: relays keep them."""

    versions: list[int]


class RunManifest(Record):
    """What a worker needs to join: everything else it reads from `run.json` under `store`."""

    run: str
    store: str
    storage: dict[str, str] = {}
    """The section `storage` of the config: what opens the store, beside its URL. Never a secret."""
    store_id: str
    generation: int
    format_version: int
