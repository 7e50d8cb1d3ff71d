"""Prompt sources: raw rows from a procedural data set, a file, or a hub; split into training and held-out prompts.

    source -> raw rows -> validated -> held out (chosen by content) | training (what is left)

Held-out prompts are chosen first and by content, then left out of training: two seeds of a procedural source, or two
rows of a file, may hold the same problem. Every row that is left out is counted, with the reason.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from laminar.buffer.prompts import MAX_EXAMPLES, validate_rows
from laminar.config import EvaluationConfig, PromptsConfig
from laminar.errors import ConfigError
from laminar.workers.environments.files import read_rows
from laminar.workers.environments.single_turn import spelled_messages

Row = dict[str, Any]
"""A row of schema PROMPTS without its `prompt_index`."""
Content = Callable[[Mapping[str, Any]], str]
"""Rows of equal content are one prompt."""

_CHUNK = 500
"""Problems of a procedural data set that are made at once: some data sets know no index beyond their size."""
_PATIENCE = 1000
"""A procedural source counts as exhausted after this many draws without a new problem, or ten times the distinct
problems seen, whichever is more: with 200 problems, the chance to miss one is then below 1e-4."""
_LETTERS = "abcdefghij"


@dataclass
class SourceReport:
    """What became of a source's rows. `left_out` counts by reason, `examples` says where the first of each stand: a
    line of a file of lines (from 1), a row of a table (from 0)."""

    source: str
    drawn: int = 0
    distinct: int = 0
    train: int = 0
    held_out: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, example: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        if self.left_out[reason] <= MAX_EXAMPLES:
            self.examples.setdefault(reason, []).append(example)

    def told(self) -> str:
        """`2 not JSON (line 3; line 9), 1 empty (line 4: '')`: what was left out; empty if nothing was."""
        return ", ".join(
            f"{count} {reason} ({'; '.join(self.examples[reason])}{'; …' if count > MAX_EXAMPLES else ''})"
            for reason, count in sorted(self.left_out.items())
        )

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.distinct} distinct of {self.drawn} drawn"]
        if self.left_out:
            parts.append(f"left out: {self.told()}")
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True)
class PromptSet:
    """`train` and `held_out` share no prompt. Rows have the columns of PROMPTS but `prompt_index`."""

    train: list[Row]
    held_out: list[Row]
    report: SourceReport


def load_prompts(
    config: PromptsConfig, evaluation: EvaluationConfig, *, reward: str = "", environment: bool = False
) -> PromptSet:
    """Read the configured source. Deterministic in its arguments. Blocks: call it in a thread.

    `reward`: the built-in reward that scores the prompts; those that it could only fail on are left out. `environment`:
    whether one plays them: rows of a file or data set with equal words may be different tasks then. Raises ConfigError
    if the source cannot be read, or if no prompt is left for training."""
    content = task_key if environment else content_key
    report = SourceReport(f"{config.source} {config.dataset}".strip())
    if config.source in ("file", "huggingface"):
        raw = _file_rows(config, report) if config.source == "file" else _huggingface_rows(config)
        train, held_out = _split(_usable(raw, config, report, reward, content), config, evaluation, content)
    else:
        make = _reasoning_gym(config) if config.source == "reasoning-gym" else _reversals
        train, held_out = _procedural(make, config, evaluation, report)
        for row in train:
            if missing := _unscorable(reward, row["answer"], json.loads(row["metadata"])):
                raise ConfigError(f"{report.source} has prompts {missing}")
    report.train, report.held_out = len(train), len(held_out)
    _explain_shortage(config, evaluation, report)
    return PromptSet([_finished(row, config) for row in train], [_finished(row, config) for row in held_out], report)


def content_key(row: Mapping[str, Any]) -> str:
    """Rows with equal keys are the same prompt: white space and the answer do not make another."""
    return hashlib.sha256(" ".join(row["prompt"].split()).encode()).hexdigest()


def task_key(row: Mapping[str, Any]) -> str:
    """Rows with equal keys are the same task of an environment, which may set it by the answer or the metadata."""
    told = json.dumps([row["answer"], json.loads(row["metadata"])], sort_keys=True)
    return hashlib.sha256(f"{content_key(row)}:{told}".encode()).hexdigest()


def _explain_shortage(config: PromptsConfig, evaluation: EvaluationConfig, report: SourceReport) -> None:
    if report.train == 0:
        cause = f", {report.held_out} of them held out: lower evaluation.size" if report.held_out else ""
        raise ConfigError(f"no prompt is left for training from {report}{cause}")
    if report.held_out < evaluation.size:
        report.notes.append(f"evaluation.size = {evaluation.size}, but only {report.held_out} could be held out")
    if config.source in ("reasoning-gym", "reverse") and report.train < config.size:
        report.notes.append(f"prompts.size = {config.size}, but the source has only {report.train} more problems")


def _finished(row: Row, config: PromptsConfig) -> Row:
    prompt = row["prompt"]
    if config.system and spelled_messages(prompt) is None:
        messages = [{"role": "system", "content": config.system}, {"role": "user", "content": prompt}]
        prompt = json.dumps(messages, ensure_ascii=False)
    return {
        "prompt": prompt,
        "answer": row["answer"],
        "environment": "",
        "metadata": row["metadata"],
        "source": f"{config.source}:{config.dataset}" if config.dataset else config.source,
    }


# Procedural sources


def _procedural(
    make: Callable[[int], Iterator[Row]], config: PromptsConfig, evaluation: EvaluationConfig, report: SourceReport
) -> tuple[list[Row], list[Row]]:
    held_out = _draw(make(evaluation.seed), evaluation.size, set(), report)
    train = _draw(make(config.seed), config.size, {content_key(row) for row in held_out}, report)
    report.distinct = len(held_out) + len(train)
    return train, held_out


def _draw(problems: Iterator[Row], wanted: int, taken: set[str], report: SourceReport) -> list[Row]:
    """The first `wanted` problems whose content is not in `taken`; fewer if the source seems exhausted."""
    rows: list[Row] = []
    seen = set(taken)
    barren = 0
    while len(rows) < wanted and barren < max(_PATIENCE, 10 * len(seen)):
        row = next(problems)
        report.drawn += 1
        key = content_key(row)
        barren = barren + 1 if key in seen else 0
        if key not in seen:
            seen.add(key)
            rows.append(row)
    return rows


def _reasoning_gym(config: PromptsConfig) -> Callable[[int], Iterator[Row]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "prompts.source = 'reasoning-gym' needs a package that is not installed: pip install reasoning-gym==0.1.25"
        ) from error
    name, options = config.dataset, dict(config.options)
    for key in ("seed", "size"):
        if key in options:
            raise ConfigError(f"prompts.options.{key} is set by prompts.{key}; remove it")

    if name not in reasoning_gym.factory.DATASETS:
        near = difflib.get_close_matches(name, reasoning_gym.factory.DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "reasoning_gym.factory.DATASETS lists them"
        raise ConfigError(f"reasoning-gym has no data set prompts.dataset = {name!r}; {hint}")

    def create(seed: int) -> Any:
        try:
            return reasoning_gym.create_dataset(name, seed=seed, size=_CHUNK, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym data set {name!r} refuses prompts.options: {error}") from error

    def problems(seed: int) -> Iterator[Row]:
        checked = False
        while True:
            dataset = create(seed)
            for index in range(_CHUNK):
                entry = dataset[index]
                if not checked:
                    _check_scorable(name, dataset, entry)
                    checked = True
                metadata = {"dataset": name, "entry": entry, **({"options": options} if options else {})}
                yield {
                    "prompt": entry["question"],
                    "answer": _text(entry["answer"]),
                    "metadata": json.dumps(metadata, ensure_ascii=False, default=str),
                }
            seed += _CHUNK

    return problems


def _check_scorable(name: str, dataset: Any, entry: Mapping[str, Any]) -> None:
    """Some data sets score by Python objects that JSON does not keep: their right answers would be scored as wrong."""
    kept = json.loads(json.dumps(entry, default=str))
    answer = entry["answer"]
    try:
        same = dataset.score_answer(answer, kept) == dataset.score_answer(answer, dict(entry))
    except Exception as error:  # a data set's scorer may raise anything on an entry of other types
        raise ConfigError(f"reasoning-gym data set {name!r} cannot score a stored problem: {error!r}") from error
    if not same:
        raise ConfigError(
            f"reasoning-gym data set {name!r} scores a stored problem differently (its entries do not survive "
            "JSON); write its problems to a .jsonl file and score them with a reward of your own"
        )


def _reversals(seed: int) -> Iterator[Row]:
    generator = random.Random(seed)
    while True:
        word = "".join(generator.choice(_LETTERS) for _ in range(generator.randint(3, 5)))
        yield {"prompt": f"reverse {word}", "answer": word[::-1], "metadata": "{}"}


# Files and data sets


def _file_rows(config: PromptsConfig, report: SourceReport) -> Iterator[tuple[str, Row]]:
    if not config.dataset:
        raise ConfigError("prompts.source = 'file' needs prompts.dataset: the path of a .parquet or .jsonl file")
    return read_rows(config.dataset, report.leave_out)


def _huggingface_rows(config: PromptsConfig) -> Iterator[tuple[str, Row]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "prompts.source = 'huggingface' needs a package that is not installed: pip install 'laminar[huggingface]'"
        ) from error
    if not config.dataset:
        raise ConfigError("prompts.source = 'huggingface' needs prompts.dataset: the name of a data set")
    options = {"split": "train", **config.options}
    try:
        rows: Iterable[Row] = datasets.load_dataset(config.dataset, **options)
    except Exception as error:  # the hub's client raises errors of many libraries
        raise ConfigError(f"data set {config.dataset!r} with {options} cannot be loaded: {error}") from error
    return ((f"row {index}", dict(row)) for index, row in enumerate(rows))


def _usable(
    raw: Iterable[tuple[str, Row]], config: PromptsConfig, report: SourceReport, reward: str, content: Content
) -> list[Row]:
    """Rows of a file or data set that can be used, one for each content."""
    places: list[str] = []
    try:
        columns = _columns(raw, config, report, reward, places)
        table, validation = validate_rows(columns, place=places.__getitem__, content=content)
    except ConfigError as error:
        before = f"; before that, left out: {report.told()}" if report.left_out else ""
        raise ConfigError(f"{report.source}: {error}{before}") from error
    report.drawn = validation.rows + sum(report.left_out.values())
    for reason, count in validation.dropped.items():
        report.left_out[reason] = report.left_out.get(reason, 0) + count
        report.examples[reason] = [*report.examples.get(reason, []), *validation.examples[reason]][:MAX_EXAMPLES]
    rows: list[Row] = table.to_pylist()
    report.distinct = len(rows)
    return rows


def _columns(
    raw: Iterable[tuple[str, Row]], config: PromptsConfig, report: SourceReport, reward: str, places: list[str]
) -> Iterator[Row]:
    """Rows by the columns of PROMPTS; `places` takes where each stands. All columns but prompt and answer become
    metadata: rewards may need them."""
    first = True
    for place, row in raw:
        if first and config.prompt_column not in row:
            raise ConfigError(
                f"there is no column {config.prompt_column!r}; set prompts.prompt_column to one of "
                f"{', '.join(map(repr, row))}"
            )
        first = False
        rest = {k: v for k, v in row.items() if k not in (config.prompt_column, config.answer_column, "metadata")}
        metadata = _parsed(row.get("metadata"))
        if isinstance(metadata, Mapping):
            rest.update(metadata)
        elif metadata is not None:
            rest["metadata"] = metadata
        answer = _text(row.get(config.answer_column))
        if row.get(config.prompt_column) and (missing := _unscorable(reward, answer, rest, config.answer_column)):
            report.leave_out(missing, place)
            continue
        places.append(place)
        yield {
            "prompt": row.get(config.prompt_column),
            "answer": answer,
            "metadata": json.dumps(rest, ensure_ascii=False, default=str),
        }


def _unscorable(reward: str, answer: str, metadata: Mapping[str, Any], column: str = "") -> str:
    """What the reward would miss in this row; empty if nothing."""
    if reward == "exact" and not answer.strip():
        hint = f" (prompts.answer_column = {column!r})" if column else ""
        return f"without an answer, which reward.name = 'exact' needs{hint}"
    if reward == "reasoning-gym" and not {"dataset", "entry"} <= metadata.keys():
        return "without the problem that reward.name = 'reasoning-gym' scores (use 'exact', or a reward of your own)"
    return ""


def _parsed(metadata: object) -> object:
    if not isinstance(metadata, str):
        return metadata
    try:
        return json.loads(metadata)
    except ValueError:
        return metadata


def _text(answer: object) -> str:
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def _split(
    rows: list[Row], config: PromptsConfig, evaluation: EvaluationConfig, content: Content
) -> tuple[list[Row], list[Row]]:
    """Held out are the rows whose content hashes lowest under the seed: the choice does not depend on their order."""

    def rank(row: Row) -> str:
        return hashlib.sha256(f"{evaluation.seed}:{content(row)}".encode()).hexdigest()

    chosen = {content(row) for row in sorted(rows, key=rank)[: evaluation.size]}
    held_out = [row for row in rows if content(row) in chosen]
    train = [row for row in rows if content(row) not in chosen]
    return train[: config.size], held_out
