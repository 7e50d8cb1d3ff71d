"""Questions to a store: what was generated, by whom, how it was trained on; what is said when there is no answer."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from laminar.errors import ConfigError, StoreError
from laminar.workers.supervisor.ending import Ending, forget_ending, write_ending
from laminar.workers.viewing.export import export_table
from laminar.workers.viewing.inspect import (
    StoreView,
    TrajectoryView,
    list_experience,
    open_store,
    resolve_target,
    show_trajectory,
)
from laminar.workers.viewing.render import status, trajectory
from laminar.workers.viewing.status import run_status, step_rows
from laminar.workers.viewing.summary import collect, summary

MakeStore = Callable[..., Path]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestNamingARun:
    def test_by_folder_name_or_default(self, make_store: MakeStore, in_folder: Path) -> None:
        root = make_store("my-run")
        assert resolve_target(str(root)) == str(root)
        assert resolve_target("my-run") == "runs/my-run"
        assert resolve_target(None) == "runs/my-run"
        assert resolve_target(f"file://{root}") == str(root)
        assert resolve_target("s3://bucket/run/") == "s3://bucket/run"
        assert open_store("my-run").run.run == "my-run"

    async def test_inside_an_event_loop_too(self, make_store: MakeStore) -> None:
        root = make_store(tables=False)
        assert StoreView.open(str(root)).run.run == "my-run"

    def test_a_misspelt_name_is_answered_with_the_near_one(self, make_store: MakeStore, in_folder: Path) -> None:
        make_store("my-run", tables=False)
        with pytest.raises(ConfigError, match="did you mean 'my-run'"):
            resolve_target("my-rum")

    def test_a_place_that_is_looked_at_once_is_named_once(self, in_folder: Path) -> None:
        """Below runs/ an absolute path is the same path."""
        with pytest.raises(ConfigError) as absolute:
            resolve_target(str(in_folder / "nothing"))
        assert str(absolute.value).count("nothing'") == 1 and "nor at" not in str(absolute.value)
        with pytest.raises(ConfigError, match=r"no store at 'nothing', nor at 'runs/nothing'; "):
            resolve_target("nothing")

    def test_no_run_at_all(self, in_folder: Path) -> None:
        with pytest.raises(ConfigError, match="there is no run under runs/"):
            resolve_target(None)

    def test_a_folder_without_a_manifest_is_no_store_and_stays_untouched(self, in_folder: Path) -> None:
        (in_folder / "empty").mkdir()
        with pytest.raises(StoreError, match=r"run\.json"):
            open_store("empty")
        assert list((in_folder / "empty").iterdir()) == []


class TestQuestions:
    def test_ls_shows_the_newest_first_and_takes_a_condition(self, make_store: MakeStore) -> None:
        store = open_store(str(make_store()))
        rows = list_experience(store, limit=3).to_pylist()
        assert [(row["group"], row["sample"]) for row in rows] == [(12, 3), (12, 2), (12, 1)]
        chosen = list_experience(store, limit=100, where="\"group\" < 2 and finish_reason = 'length'").to_pylist()
        assert [(row["group"], row["sample"]) for row in chosen] == [(1, 0), (0, 0)]

    def test_a_dumped_row_has_its_id_group_and_sample(self, make_store: MakeStore, tmp_path: Path) -> None:
        """Case 29: dump of one row; it has its id, group and sample."""
        path = tmp_path / "one.jsonl"
        assert export_table(open_store(str(make_store())), path, where='"group" = 3 and sample = 2') == 1
        row = json.loads(path.read_text())
        assert (row["group"], row["sample"], row["prompt_index"]) == (3, 2, 16)

    def test_sql_joins_experience_with_steps(self, make_store: MakeStore) -> None:
        answer = open_store(str(make_store())).query(
            'select count(*) as n, max(s.staleness) as staleness from experience e join steps s using ("group", sample)'
        )
        assert answer.to_pylist() == [{"n": 44, "staleness": 1}]

    def test_tables_without_a_commit_are_empty_and_can_still_be_joined(self, make_store: MakeStore) -> None:
        store = open_store(str(make_store(tables=False)))
        assert store.query('select * from experience join steps using ("group", sample)').num_rows == 0
        with pytest.raises(StoreError, match="no committed row yet"):
            list_experience(store, limit=5)

    def test_a_table_that_does_not_open_is_an_error_not_an_empty_table(self, make_store: MakeStore) -> None:
        root = make_store()
        for manifest in (root / "experience.lance" / "_versions").iterdir():
            manifest.write_bytes(b"\0" * 16)
        with pytest.raises(StoreError, match=r"experience\.lance (does not open|lacks the columns)"):
            open_store(str(root)).query("select 1")

    @pytest.mark.parametrize(
        ("sql", "said"),
        [
            ("select group from experience", 'write the column as "group"'),
            ("select max(at) from step_metrics", 'write the column as "at"'),
            ("select nope from experience", "nope"),
            ("select * from experiences", "tables: experience, steps"),
        ],
    )
    def test_bad_sql_is_explained(self, make_store: MakeStore, sql: str, said: str) -> None:
        with pytest.raises(ConfigError) as error:
            open_store(str(make_store())).query(sql)
        assert said in str(error.value)


class TestOneTrajectory:
    def test_who_wrote_what_under_which_version(self, make_store: MakeStore) -> None:
        view = show_trajectory(open_store(str(make_store())), 3, 3)
        assert [(s.start, s.end, s.version, s.worker) for s in view.spans] == [
            (0, 4, 2, "rollout-a-1-aa"),
            (4, 6, 2, "rollout-b-2-bb"),
        ]
        assert [(s.role, s.text) for s in view.segments] == [
            ("policy", "answer four"),
            ("environment", "tool says"),
            ("policy", "answer five"),
        ]
        assert view.prompt == "what is two plus two"
        assert [step["staleness"] for step in view.steps] == [1]

    def test_without_a_tokenizer_the_stored_text_and_the_ids_are_shown(
        self, make_store: MakeStore, tmp_path: Path
    ) -> None:
        view = show_trajectory(open_store(str(make_store(model_folder=str(tmp_path / "gone")))), 3, 3)
        assert view.prompt is None
        text = printed(view)
        assert "no tokenizer found" in text and "[environment] 7 8" in text and "answer four" in text

    def test_one_that_was_not_trained_says_why(self, make_store: MakeStore) -> None:
        store = open_store(str(make_store()))
        equal, failed = (printed(show_trajectory(store, group, 0)) for group in (11, 12))
        assert "retired with the decision of step 11 as no_signal: its rewards were all equal" in equal
        assert "retired with the decision of step 11 as error: too few of its trajectories ended without" in failed
        (Path(store.root) / "batches" / "000000011.json").unlink()
        assert "its group is not decided yet" in printed(show_trajectory(store, 11, 0))

    def test_an_absent_one_is_answered_with_what_there_is(self, make_store: MakeStore) -> None:
        store = open_store(str(make_store()))
        with pytest.raises(ConfigError, match=r"no committed sample 9.*\[0, 1, 2, 3\]"):
            show_trajectory(store, 3, 9)
        with pytest.raises(ConfigError, match="13 groups have, the highest is 12"):
            show_trajectory(store, 99, 0)


def printed(view: TrajectoryView) -> str:
    return shown(trajectory(view))


def shown(what: object) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


class TestExport:
    @pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
    def test_all_rows_arrive_in_every_format(self, make_store: MakeStore, tmp_path: Path, ending: str) -> None:
        path = tmp_path / f"out.{ending}"
        assert export_table(open_store(str(make_store())), path) == 52
        if ending == "parquet":
            rows = pq.read_table(path).to_pylist()
        elif ending == "jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            rows = [{**row, "token_ids": json.loads(row["token_ids"])} for row in csv.DictReader(path.open())]
        assert len(rows) == 52
        assert rows[3]["token_ids"] == [5, 6, 7, 8, 5, 9]

    def test_an_existing_file_is_kept_unless_forced(self, make_store: MakeStore, tmp_path: Path) -> None:
        store, path = open_store(str(make_store())), tmp_path / "out.csv"
        path.write_text("mine")
        with pytest.raises(ConfigError, match="--force"):
            export_table(store, path)
        assert path.read_text() == "mine"
        assert export_table(store, path, table="steps", force=True) == 44

    def test_a_failed_export_leaves_nothing(self, make_store: MakeStore, tmp_path: Path) -> None:
        store = open_store(str(make_store()))
        (tmp_path / "out").mkdir()
        with pytest.raises(ConfigError, match="does not run"):
            export_table(store, tmp_path / "out" / "a.csv", where="nope = 1")
        with pytest.raises(ConfigError, match="--format"):
            export_table(store, tmp_path / "out" / "a.xls")
        assert list((tmp_path / "out").iterdir()) == []


class TestTheWholeRun:
    def test_steps_come_with_reward_length_and_staleness(self, make_store: MakeStore) -> None:
        rows = step_rows(open_store(str(make_store())))
        assert [row.step for row in rows] == list(range(12))
        assert rows[2].reward == pytest.approx(0.2)
        assert rows[2].staleness_max == 2.0
        assert rows[2].metrics["entropy"] is None

    def test_status_after_the_end_says_why_it_is_not_live(self, make_store: MakeStore) -> None:
        root = make_store()
        (root / "etcd").mkdir()
        (root / "etcd" / "endpoint").write_text("127.0.0.1:1\n")
        result = run_status(open_store(str(root)), [])
        assert result.live is None and "nothing listens at 127.0.0.1:1" in result.why_not_live
        assert result.statuses == {"ok": 48, "reward_timeout": 4}
        assert result.last is not None and result.last.step == 11

    @pytest.mark.parametrize(
        ("state", "reason", "told"),
        [
            ("done", "12 steps are trained (run.max_steps)", "done at 2026-11-29 20:00:00 UTC: 12 steps are trained"),
            ("stopped", "stopped by a signal", "stopped by a signal; the same command resumes it"),
            ("failed", "disk is full at /x\n  line", "failed at 2026-11-29 20:00:00 UTC: disk is full at /x; the same"),
        ],
    )
    async def test_status_after_the_end_says_how_it_ended(
        self, make_store: MakeStore, state: Any, reason: str, told: str
    ) -> None:
        store = open_store(str(make_store()))
        await write_ending(store.storage, Ending(state=state, reason=reason, at_us=1_795_982_400_000_000))
        text = shown(status(await asyncio.to_thread(run_status, store, [])))
        assert f"step 12/12, {state}" in text and told in text
        await forget_ending(store.storage)
        text = shown(status(await asyncio.to_thread(run_status, store, [])))
        assert "not running" in text and "its `laminar run` was killed, or works where" in text

    def test_what_was_dropped_is_counted_and_reported_by_length(self, make_store: MakeStore) -> None:
        """Case 30: prompts dropped were mostly the long ones; drops are counted, and reported by length."""
        result = collect(open_store(str(make_store())), state="done")
        assert [(fate.name, fate.groups, fate.trajectories) for fate in result.fates] == [
            ("trained", 11, 44),
            ("error", 1, 4),
            ("no_signal", 1, 4),
        ]
        assert result.fates[1].longest_tokens == 6
        text = summary(result)
        assert "1 retired, no_signal (4 trajectories, mean" in text
        assert "reward      first 5 steps 0.200, last 10 steps 0.425" in text
        assert "laminar plot" in text and "laminar experience ls" in text

    def test_a_run_that_ended_before_its_first_step_has_a_summary(self, make_store: MakeStore) -> None:
        """Case 20 and 47: nothing was trained; the end is clean and says so."""
        text = summary(collect(open_store(str(make_store(tables=False))), state="failed", reason="no reward"))
        assert "failed after 0 of 12 steps: no reward" in text
        assert "reward      none" in text and "groups      none was consumed" in text
        assert "laminar plot" not in text and "laminar experience" not in text, "they would have nothing to show"
        assert "laminar audit" in text
