from __future__ import annotations

import json

import pytest

from laminar.errors import WeightsError

MIXED = [[(5, 1.0), (3, 0.0), (7, 0.0)], [(4, 1.0), (6, 0.0)]]
SILENT = [[(3, 0.0), (4, 0.0)]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_takes_the_same_steps(learner_of, batch_of, weights_of, tmp_path, dtype):
    """Two steps, save, two more: the same bits as load and the same two, KL reference and moments included."""
    settings = {"dtype": dtype, "kl_coefficient": 0.05, "warmup_steps": 3}
    batches = [batch_of(groups, seed=n) for n, groups in enumerate([MIXED, SILENT, MIXED, MIXED])]
    learner = learner_of(**settings)
    for batch in batches[:2]:
        learner.train(batch)
    learner.save(tmp_path)
    expected = [learner.train(batch) for batch in batches[2:]]

    resumed = learner_of(**settings)
    resumed.load(tmp_path)
    assert resumed.version == 2
    found = [resumed.train(batch) for batch in batches[2:]]
    assert [untimed(r) for r in found] == [untimed(r) for r in expected]
    assert weights_of(resumed) == weights_of(learner)


def untimed(result):
    return result.samples, {k: v for k, v in result.metrics.items() if not k.endswith("_s")}


def test_loaded_weights_are_published_before_any_step(learner_of, batch_of, weights_of, tmp_path):
    learner = learner_of(dtype="bfloat16")
    learner.train(batch_of(MIXED))
    learner.save(tmp_path)
    resumed = learner_of(dtype="bfloat16")
    resumed.load(tmp_path)
    assert weights_of(resumed) == weights_of(learner)


def test_a_checkpoint_before_the_first_update_loads(learner_of, batch_of, weights_of, tmp_path):
    learner = learner_of()
    learner.train(batch_of(SILENT))
    learner.save(tmp_path)
    resumed = learner_of()
    resumed.load(tmp_path)
    assert (resumed.version, weights_of(resumed)) == (1, weights_of(learner))


def test_loading_goes_back_too(learner_of, batch_of, weights_of, tmp_path):
    """A learner that went on is set back whole: no moment of its later steps stays."""
    learner = learner_of()
    learner.save(tmp_path)
    first = learner.train(batch_of(MIXED)), weights_of(learner)
    learner.train(batch_of(MIXED))
    learner.load(tmp_path)
    again = learner.train(batch_of(MIXED)), weights_of(learner)
    assert (untimed(first[0]), first[1]) == (untimed(again[0]), again[1])


def test_the_learning_rate_may_change_on_resume(learner_of, batch_of, tmp_path):
    """Case 37: it is the config's, not the checkpoint's."""
    learner = learner_of(learning_rate=1e-3)
    learner.train(batch_of(MIXED))
    learner.save(tmp_path)
    resumed = learner_of(learning_rate=1e-5)
    resumed.load(tmp_path)
    assert resumed.train(batch_of(MIXED)).metrics["learning_rate"] == 1e-5


@pytest.mark.parametrize("file", ["master.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_is_found(learner_of, batch_of, weights_of, tmp_path, file):
    learner = learner_of()
    learner.train(batch_of(MIXED))
    learner.save(tmp_path)
    data = bytearray((tmp_path / file).read_bytes())
    data[-5] ^= 1
    (tmp_path / file).write_bytes(data)
    before = weights_of(learner)
    with pytest.raises(WeightsError, match=f"{file} is damaged"):
        learner.load(tmp_path)
    assert (learner.version, weights_of(learner)) == (1, before)


def test_a_missing_or_torn_file_is_named(learner_of, tmp_path):
    learner = learner_of()
    learner.save(tmp_path)
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"optimizer\.safetensors is missing"):
        learner.load(tmp_path)
    state = tmp_path / "learner.json"
    state.write_text(state.read_text()[:20])
    with pytest.raises(WeightsError, match=r"learner\.json is unreadable"):
        learner.load(tmp_path)


def test_a_newer_format_is_refused(learner_of, tmp_path):
    learner = learner_of()
    learner.save(tmp_path)
    state = tmp_path / "learner.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 2}))
    with pytest.raises(WeightsError, match="has format 2; this version of Laminar reads 1"):
        learner.load(tmp_path)


def test_the_checkpoint_of_another_model_or_type_is_refused(learner_of, other_model_folder, tmp_path):
    """Case 37: a changed model is refused, naming both layouts."""
    other = learner_of(other_model_folder)
    other.save(tmp_path)
    learner = learner_of()
    with pytest.raises(WeightsError, match=other.layout.digest[:12]):
        learner.load(tmp_path)
    with pytest.raises(WeightsError, match="model and dtype may not change"):
        learner_of(other_model_folder, dtype="bfloat16").load(tmp_path)


def test_a_folder_holds_no_pickle(learner_of, batch_of, tmp_path):
    learner = learner_of()
    learner.train(batch_of(MIXED))
    learner.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learner.json", "master.safetensors", "optimizer.safetensors"]
