"""Recorded steps again from the store alone, bit for bit, or with other settings beside the record."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from laminar.buffer.schema import STEP_METRICS
from laminar.cli import app
from laminar.errors import ConfigError, CorruptSegment, StoreError, WeightsError
from laminar.workers.viewing.inspect import StoreView, open_store
from laminar.workers.viewing.replay import Question, ReplayedStep, as_table, changes_of, devices_of, replay, verdict


@pytest.fixture
def copy(trained_store: Path, tmp_path: Path) -> Path:
    """Of the store, to damage."""
    return Path(shutil.copytree(trained_store, tmp_path / "copy"))


def run(store: Path, *overrides: str, **question: Any) -> list[ReplayedStep]:
    view = open_store(str(store))
    told: list[ReplayedStep] = []
    found = replay(view, Question(changes=changes_of(view.run, overrides), **question), told.append)
    assert told == found
    return found


# -- the same settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question, steps",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"checkpoint": 2}, [2, 3, 4]),
        ({"checkpoint": 0, "first": 3}, [3, 4]),
        ({"first": 3, "count": 1}, [3]),
        ({"count": 2}, [0, 1]),
    ],
)
def test_the_same_bits_come_out(trained_store: Path, question: dict[str, Any], steps: list[int]) -> None:
    """Through a resume that changed the learning rate, from the initial model and from checkpoints."""
    found = run(trained_store, **question)
    assert [s.step for s in found] == steps and all(s.equal for s in found)
    for s in found:
        assert s.recorded is not None
        assert {n: v for n, v in s.recorded.metrics.items() if n in s.metrics and "engine" not in n} == {
            n: v for n, v in s.metrics.items() if n in s.recorded.metrics and "engine" not in n
        }
        assert s.metrics["learning_rate"] == (1e-3 if s.step < 2 else 2e-4)
    fine, text = verdict(found, {})
    assert fine and text == f"{len(steps)} of {len(steps)} recorded digests came out equal: bitwise the same"


def test_the_store_stays_as_it_is(copy: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob("*") if p.is_file()}

    before = content()
    run(copy, "trainer.learning_rate=1e-2", first=3)
    assert content() == before


# -- other settings ---------------------------------------------------------------------------------------------


def test_other_settings_count_from_the_first_step_that_is_shown(trained_store: Path) -> None:
    """The step's gradient is the recorded one, its update is not; the next step starts elsewhere."""
    found = run(trained_store, "trainer.learning_rate=1e-2", "trainer.clip_high=0.5", checkpoint=0, first=3)
    assert [s.equal for s in found] == [False, False]
    assert found[0].recorded and found[1].recorded
    assert found[0].metrics["grad_norm"] == found[0].recorded.metrics["grad_norm"]
    assert found[1].metrics["grad_norm"] != found[1].recorded.metrics["grad_norm"]
    assert found[0].metrics["learning_rate"] == 1e-2
    fine, text = verdict(found, {"trainer.learning_rate": 1e-2})
    assert fine and text.endswith("trained with trainer.learning_rate = 0.01")


@pytest.mark.parametrize(
    "override, message",
    [
        ("trainer.groups_per_step=4", "trainer.groups_per_step: this does not shape an optimizer step"),
        ("trainer.learning_rat=1", "did you mean 'learning_rate'"),
        ("trainer.learning_rate=-1", "trainer.learning_rate = -1"),
        ("learning_rate=1", "not of the form section.key=value"),
    ],
)
def test_what_cannot_be_set_is_refused(trained_store: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changes_of(StoreView.open(str(trained_store)).run, [override])


def test_the_number_of_devices_may_be_another_than_the_runs(trained_store: Path) -> None:
    """The same steps by two processes: other bits, nearly the same numbers."""
    view = open_store(str(trained_store))
    assert changes_of(view.run, ["trainer.devices=2"]) == {}
    assert devices_of(view.run, ["trainer.devices=2", "trainer.clip_high=0.3"]) == 2
    assert devices_of(view.run, ["trainer.clip_high=0.3"]) is None
    with pytest.raises(ConfigError, match=r"trainer\.devices = 0"):
        devices_of(view.run, ["trainer.devices=0"])
    (one,), (two,) = run(trained_store, count=1), run(trained_store, count=1, devices=2)
    assert two.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=0.05)
    assert one.equal and (two.equal or "trainer.devices=N" in verdict([two], {})[1])


# -- what is not there ------------------------------------------------------------------------------------------


def test_a_missing_checkpoint_names_those_that_are_there(trained_store: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of version 3 in .*; there are: 2, 4, 5, and 0, the initial"):
        run(trained_store, checkpoint=3)
    with pytest.raises(ConfigError, match="step 1 comes before the checkpoint of version 4"):
        run(trained_store, checkpoint=4, first=1)


def test_steps_that_were_never_decided(trained_store: Path) -> None:
    with pytest.raises(ConfigError, match=r"step 5 of .* cannot be replayed: 5 steps are decided"):
        run(trained_store, first=5)


def test_a_batch_file_that_is_gone(copy: Path) -> None:
    """It is made again from the experience, as a restarted trainer does; without that it is named."""
    for path in (copy / "batches").glob("000000003-*.arrow"):
        path.unlink()
    assert all(s.equal for s in run(copy, first=3))
    shutil.rmtree(copy / "experience.lance")
    with pytest.raises((StoreError, CorruptSegment), match="step 3 cannot be trained"):
        run(copy, first=3)


def test_a_decision_that_is_gone(copy: Path) -> None:
    (copy / "batches" / "000000003.json").unlink()
    with pytest.raises(StoreError, match="no decision of step 3"):
        run(copy, first=2)


def test_a_changed_model_is_refused(copy: Path, tmp_path: Path, model_folder: Path) -> None:
    """Case 37: a changed model is refused, naming both fingerprints."""
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    file = StoreView.open(str(copy)).run
    with pytest.raises(ConfigError, match=rf"has changed: .* began with {file.fingerprints.model[:16]}…, this is"):
        run(copy, model=other)
    with pytest.raises(ConfigError, match=r"the initial model is not at .*nowhere; .*--model"):
        run(copy, model=tmp_path / "nowhere")
    assert run(copy, count=1, model=model_folder)[0].equal


def test_a_damaged_checkpoint_is_named(copy: Path) -> None:
    path = copy / "checkpoints" / "step-000000002" / "trainer" / "master.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"step-000000002/trainer does not open: .*is damaged"):
        run(copy, checkpoint=2)
    assert (copy / "checkpoints" / "step-000000002" / "checkpoint.json").exists(), "nothing is written into the store"


def test_steps_without_a_record_are_trained_all_the_same(copy: Path) -> None:
    shutil.rmtree(copy / "step_metrics.lance")
    found = run(copy, count=2)
    assert [(s.recorded, s.equal) for s in found] == [(None, None)] * 2
    assert "(2 steps have none: not committed, or not published)" in verdict(found, {})[1]
    assert as_table(found)["recorded_grad_norm"].to_pylist() == [None, None]


# -- the command ------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_the_command_prints_each_step_beside_its_record(trained_store: Path) -> None:
    result = command(str(trained_store), "--checkpoint", "4")
    assert result.exit_code == 0, result.output
    step, text = result.output.strip().splitlines()
    assert step.startswith("step 4 | reward 0.5 (0.5) | loss ") and step.endswith(" equal")
    assert text == "1 of 1 recorded digests came out equal: bitwise the same"


def test_other_bits_under_the_same_settings_are_an_error(copy: Path) -> None:
    import lance

    rows = lance.dataset(str(copy / "step_metrics.lance")).to_table().to_pylist()
    shutil.rmtree(copy / "step_metrics.lance")
    changed = [{**r, "digest": "0" * 64} if r["step"] == 1 else r for r in rows]
    lance.write_dataset(pa.Table.from_pylist(changed, schema=STEP_METRICS), str(copy / "step_metrics.lance"))
    result = command(str(copy), "--steps", "2")
    assert result.exit_code == 1
    assert "1 of 2 recorded digests came out equal, step 1 is the first that did not" in result.output


def test_what_the_documentation_shows(
    trained_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (Path(__file__).parents[3] / "docs" / "inspecting.md").read_text()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my-run").symlink_to(trained_store)
    monkeypatch.chdir(tmp_path)
    lines = [line for block in re.findall(r"```bash\n(.*?)```", document, flags=re.S) for line in block.splitlines()]
    assert len(lines) == 3
    for line in lines:
        result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "slower.parquet").exists()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_all_metrics_go_to_a_file(trained_store: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"replayed.{ending}"
    arguments = (str(trained_store), "--from-step", "3", "--set", "trainer.learning_rate=1e-2", "--out", str(out))
    assert command(*arguments).exit_code == 0
    if ending == "jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        rows = pyarrow.parquet.read_table(out).to_pylist()
    assert [(r["step"], r["version"], r["equal"]) for r in rows] == [(3, 4, False), (4, 5, False)]
    assert rows[0]["grad_norm"] == rows[0]["recorded_grad_norm"] and rows[0]["recorded_learning_rate"] == 2e-4
    again = command(*arguments)
    assert isinstance(again.exception, ConfigError) and "exists" in str(again.exception)
