"""Reading a store from outside: which tables are there, what is in them, one trajectory as a whole.

    target ──resolve──▶ store root ──open_store──▶ StoreView ──▶ experience.lance, steps.lance, … in DuckDB

Nothing here writes into the store or needs a running process. A table that no commit has made yet is shown as an
empty one, so that every query works from the first second of a run on; a table that is there and cannot be opened
is an error. All functions block.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import os
import re
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from laminar.buffer.manifest import RunFile, read_run
from laminar.buffer.schema import PROMPTS, TABLES
from laminar.buffer.storage import Storage, open_storage
from laminar.errors import ConfigError, StoreError
from laminar.workers.supervisor.store_mark import MARK, read_mark

if TYPE_CHECKING:
    from laminar.workers.viewing.fates import Consumed

T = TypeVar("T")
RUNS = Path("runs")
QUERYABLE = {**TABLES, "prompts": PROMPTS}
RESERVED = re.compile(r'(?<!")\b(group(?!\s+by)|at)\b(?!")', re.IGNORECASE)
"""Columns whose names are words of DuckDB's SQL, unquoted."""
UNREADABLE = (
    "a power cut can leave an unreadable newest manifest, which the run's committer sets aside when the run is started "
    "again"
)
READ_AT_ONCE = 16
LIST_COLUMNS = '"group", sample, version, reward, status, finish_reason, len(token_ids) as tokens, turns, finished_at'


def resolve_target(target: str | None) -> str:
    """The store root that a user means: a folder, a URL, a run's name (`runs/<name>`), or nothing (the newest run).

    Raises ConfigError naming what was looked for and the near names.
    """
    if target is None:
        return _newest_run()
    target = target.removeprefix("file://")
    if "://" in target:
        return target.rstrip("/")
    here, among_runs = Path(target), RUNS / target  # one and the same, if `target` begins with a slash
    for folder in (here, among_runs):
        if folder.is_dir():
            return str(folder)
    names = [folder.name for folder in _run_folders()]
    near = difflib.get_close_matches(Path(target).name, names, n=1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"runs here: {', '.join(sorted(names))}" if names else f"there is no run under {RUNS}/ here"
    nor = f", nor at {str(among_runs)!r}" if among_runs != here else ""
    raise ConfigError(f"no store at {target!r}{nor}; {hint}")


def _run_folders() -> list[Path]:
    return [folder for folder in RUNS.iterdir() if _run_mark(folder).is_file()] if RUNS.is_dir() else []


def _run_mark(folder: Path) -> Path:
    """The file by which a folder is known for a run's: its manifest, or what says in which store that is."""
    return folder / MARK if (folder / MARK).is_file() else folder / "run.json"


def _newest_run() -> str:
    folders = _run_folders()
    if not folders:
        raise ConfigError(f"there is no run under {RUNS}/ here; name a run, a store folder or a URL")
    return str(max(folders, key=lambda folder: _run_mark(folder).stat().st_mtime_ns))


@dataclass(frozen=True)
class StoreView:
    """A store opened for reading. `run` is its manifest, `options` what its storage was opened with."""

    root: str
    run: RunFile
    storage: Storage
    options: Mapping[str, str]

    @classmethod
    def open(cls, root: str, options: Mapping[str, str] | None = None) -> StoreView:
        """Blocks. Raises StoreError or FormatTooNew if there is no run at `root` that this version can read."""
        storage = open_storage(root, options)
        return cls(root, _blocking(read_run(storage)), storage, options or {})

    @property
    def local(self) -> bool:
        return "://" not in self.root

    def uri(self, table: str) -> str:
        return f"{self.root}/{table}.lance"

    def exists(self, table: str) -> bool:
        """Whether a first commit has made this table."""
        versions = f"{table}.lance/_versions"
        if self.local:
            return os.path.isdir(f"{self.root}/{versions}")
        return bool(_blocking(self.storage.list(versions)))

    def files(self, folder: str, ending: str) -> list[tuple[str, bytes]]:
        """Path and content of each file right under `folder` whose name ends so; none if there is no such folder."""
        return _blocking(self._files(folder, ending))

    async def _files(self, folder: str, ending: str) -> list[tuple[str, bytes]]:
        paths = [f.path for f in await self.storage.list(folder)]
        wanted = [path for path in paths if path.endswith(ending) and path.count("/") == folder.count("/") + 1]
        found: list[tuple[str, bytes]] = []
        for start in range(0, len(wanted), READ_AT_ONCE):
            some = wanted[start : start + READ_AT_ONCE]
            found += zip(some, await asyncio.gather(*(self.storage.read(path) for path in some)), strict=True)
        return found

    def dataset(self, table: str) -> Any:
        """The newest committed version as a Lance data set, or an empty Arrow table where no commit was made yet.

        Raises StoreError when the table is there and does not open.
        """
        if not self.exists(table):
            return QUERYABLE[table].empty_table()
        import lance

        try:
            dataset = lance.dataset(self.uri(table), storage_options=self.storage.table_options)
        except (ValueError, OSError) as e:
            raise StoreError(f"the table {self.uri(table)} does not open: {_first_line(e)}; {UNREADABLE}") from e
        # A manifest that a power cut left as zeros opens without an error, as a table of no columns.
        missing = [name for name in QUERYABLE[table].names if name not in dataset.schema.names]
        if missing:
            raise StoreError(f"the table {self.uri(table)} lacks the columns {', '.join(missing)}; {UNREADABLE}")
        return dataset

    def require(self, table: str) -> None:
        """Raises StoreError unless `table` has rows."""
        dataset = self.dataset(table)
        rows = dataset.num_rows if isinstance(dataset, pa.Table) else dataset.count_rows()
        if rows == 0:
            raise StoreError(
                f"the table {table!r} of {self.root} has no committed row yet; rows arrive in batches of seconds once "
                f"the run works: see `laminar status {self.root}`"
            )

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """A DuckDB connection in which each table of the store is a view of its newest committed version."""
        import duckdb

        connection = duckdb.connect()
        try:
            # DuckDB would otherwise fetch an extension over the network in the middle of a query.
            connection.execute("set autoinstall_known_extensions = false")
            connection.execute("set TimeZone = 'UTC'")
            for table in QUERYABLE:
                connection.register(table, self.dataset(table))
            yield connection
        finally:
            connection.close()

    def query(self, sql: str, parameters: list[Any] | None = None) -> pa.Table:
        """The whole answer in memory. Raises ConfigError for SQL that DuckDB refuses."""
        with self.connect() as connection, explained(sql):
            relation = connection.sql(sql, params=parameters)
            if relation is None:
                raise ConfigError(f"the query {sql!r} gives no rows to show; write a select")
            return relation.to_arrow_table()


@contextmanager
def explained(sql: str) -> Iterator[None]:
    import duckdb

    try:
        yield
    except duckdb.Error as e:
        message = str(e).strip()
        hint = ""
        reserved = RESERVED.search(sql)
        if reserved and "syntax error" in message:
            word = reserved.group()
            hint = f'\n`{word}` is a word of SQL: write the column as "{word}", in double quotes'
        elif "does not exist" in message:
            hint = f"\ntables: {', '.join(QUERYABLE)}"
        raise ConfigError(f"the query does not run: {message}{hint}") from e


def open_store(target: str | None) -> StoreView:
    """Raises ConfigError if there is no such folder; StoreError or FormatTooNew if it holds no run that we can read."""
    root = resolve_target(target)
    mark = read_mark(Path(root)) if "://" not in root else None
    return StoreView.open(mark.store, mark.options) if mark else StoreView.open(root)


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: the caller may be inside an event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="store") as pool:
        return pool.submit(asyncio.run, work).result()


def list_experience(store: StoreView, *, limit: int, where: str = "") -> pa.Table:
    """The newest `limit` committed trajectories, newest first: group, sample, version, reward, status,
    finish_reason, tokens (int64, everything after the first prompt), turns, finished_at.

    `where` is a condition in DuckDB's SQL over the columns of `experience`.
    """
    store.require("experience")
    condition = f"where {where}" if where else ""
    return store.query(
        f"select {LIST_COLUMNS} from experience {condition} "
        f'order by commit_seq desc, "group" desc, sample desc limit {limit:d}'
    )


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` (exclusive, of those after the first prompt), written by one owner under one version."""

    start: int
    end: int
    version: int
    worker: str
    digest: str


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one writer and one role. `text` is None without a tokenizer."""

    role: str
    version: int
    token_ids: list[int]
    text: str | None


@dataclass(frozen=True)
class TrajectoryView:
    """One committed trajectory: its row of `experience`, its spans and segments, and the rows of `steps` it has."""

    row: dict[str, Any]
    spans: list[Span]
    segments: list[Segment]
    prompt: str | None
    steps: list[dict[str, Any]]
    consumed: Consumed | None = None
    """How its group was consumed; None while it is open."""


def show_trajectory(store: StoreView, group: int, sample: int) -> TrajectoryView:
    """Raises ConfigError, naming what there is, when (group, sample) was not committed."""
    store.require("experience")
    rows = store.query('select * from experience where "group" = ? and sample = ?', [group, sample]).to_pylist()
    if not rows:
        raise ConfigError(_why_absent(store, group, sample))
    if len(rows) > 1:
        raise StoreError(
            f"trajectory ({group}, {sample}) of {store.root} was committed {len(rows)} times, which must not be; "
            "run `laminar audit` and report it"
        )
    row = rows[0]
    steps = store.query('select * from steps where "group" = ? and sample = ? order by step', [group, sample])
    tokenizer = find_tokenizer(store)
    prompt = None if tokenizer is None else tokenizer.decode(row["prompt_ids"] or [], skip_special_tokens=False)
    spans = spans_of(row)
    from laminar.workers.viewing.fates import consumed

    segments = _segments(row, spans, tokenizer)
    return TrajectoryView(row, spans, segments, prompt, steps.to_pylist(), consumed(store, group))


def _why_absent(store: StoreView, group: int, sample: int) -> str:
    known = store.query('select sample from experience where "group" = ? order by sample', [group])
    samples = known.column("sample").to_pylist()
    if samples:
        return f"group {group} has no committed sample {sample} in {store.root}; committed are {samples}"
    highest = store.query('select max("group") as highest, count(distinct "group") as n from experience').to_pylist()[0]
    return (
        f"group {group} has no committed trajectory in {store.root}; {highest['n']} groups have, the highest is "
        f"{highest['highest']}. What is still generated is listed by `laminar status`"
    )


def spans_of(row: dict[str, Any]) -> list[Span]:
    starts = row["span_start"] or []
    ends = [*starts[1:], len(row["token_ids"] or [])]
    writers = [row[name] or [] for name in ("span_version", "span_worker", "span_digest")]
    return [Span(*values) for values in zip(starts, ends, *writers, strict=True)]


def _segments(row: dict[str, Any], spans: list[Span], tokenizer: Any) -> list[Segment]:
    mask, tokens = row["policy_mask"] or [], row["token_ids"] or []
    borders = {0, len(tokens), *(span.start for span in spans)}
    borders |= {i for i in range(1, len(mask)) if mask[i] != mask[i - 1]}
    edges = sorted(borders)
    segments = []
    for start, end in itertools.pairwise(edges):
        version = next((span.version for span in reversed(spans) if span.start <= start), row["version"])
        ids = tokens[start:end]
        text = None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
        segments.append(Segment("policy" if mask[start] else "environment", version, ids, text))
    return segments


def find_tokenizer(store: StoreView) -> Any:
    """The run's tokenizer (a `tokenizers.Tokenizer`) from the model's folder or a checkpoint's export; None if neither
    has a `tokenizer.json`. A file that is there and is not a tokenizer is a StoreError."""
    path = Path(store.run.model_folder) / "tokenizer.json"
    if path.is_file():
        text = path.read_bytes()
    elif (exported := _blocking(_exported_tokenizer(store.storage))) is not None:
        text = exported
    else:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(text)
    except Exception as e:  # tokenizers raises bare Exception
        raise StoreError(f"the tokenizer {path} does not load: {_first_line(e)}") from e


async def _exported_tokenizer(storage: Storage) -> bytes | None:
    paths = [f.path for f in await storage.list("checkpoints") if f.path.endswith("/tokenizer.json")]
    return await storage.read(paths[0]) if paths else None


@dataclass(frozen=True)
class AuditReport:
    """`problems` is empty when every invariant that the audit checks holds."""

    problems: list[str]
    summary: str


def audit_run(store: StoreView, endpoints: list[str]) -> AuditReport:
    """Check the invariants from etcd at one revision and the store. `endpoints` empty: where the run says. Blocks."""
    from laminar.workers.viewing.auditing import run_audit

    problems, summary = run_audit(store=store.root, options=store.options, endpoints=endpoints)
    return AuditReport(problems, summary)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
