"""What the config refuses of single values, and how a value of `--set` is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar.config import Config, config_from, load_config_with, with_overrides
from laminar.config_values import is_secret_name
from laminar.errors import ConfigError


def config(section: str = "run", overrides: tuple[str, ...] = (), **values: Any) -> Config:
    return config_from(with_overrides({"model": {"path": "tiny-reverse"}, section: values}, list(overrides)))


FLOATS = [
    (section, name)
    for section, field in Config.model_fields.items()
    for name, key in field.annotation.model_fields.items()  # type: ignore[union-attr]
    if key.annotation is float
]


@pytest.mark.parametrize(("section", "name"), FLOATS)
def test_no_number_may_be_infinite_or_nan(section: str, name: str) -> None:
    """A learning rate of infinity trains, and destroys the model at its first step."""
    for value in (float("inf"), float("-inf"), float("nan")):
        with pytest.raises(ConfigError, match=name):
            config(section, **{name: value})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("trainer", {"learning_rate": 1e30}),
        ("trainer", {"learning_rate": -1e-6}),
        ("trainer", {"weight_decay": -0.1}),
        ("trainer", {"betas": [1.0, 0.9]}),
        ("trainer", {"betas": [0.9, float("nan")]}),
        ("trainer", {"max_grad_norm": 0}),
        ("reward", {"timeout": 1e9}),
        ("coordination", {"lease_ttl": 1e9}),
        ("run", {"max_steps": 10**30}),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_by_name(section: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        config(section, **values)


@pytest.mark.parametrize(
    ("section", "name", "value", "says"),
    [
        ("run", "max_steps", "16", "run.max_steps = '16': a whole number is expected"),
        ("run", "max_steps", True, "run.max_steps = True: a whole number is expected"),
        ("trainer", "max_staleness", "2", "trainer.max_staleness = '2': a whole number is expected"),
        ("trainer", "learning_rate", "1e-6", "trainer.learning_rate = '1e-6': a number is expected"),
        ("trainer", "betas", [True, "0.9"], "trainer.betas = .*: a number is expected"),
        ("coordination", "lease_ttl", True, "coordination.lease_ttl = True: a number is expected"),
    ],
)
def test_texts_and_truth_values_are_no_numbers(section: str, name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(section, **{name: value})


def test_a_number_of_set_may_be_written_as_toml_does_not_have_it() -> None:
    assert config(overrides=("trainer.weight_decay=.5", "run.max_steps=007")).trainer.weight_decay == 0.5
    assert config(overrides=("run.max_steps=1e3", "trainer.max_staleness=2")).run.max_steps == 1000
    with pytest.raises(ConfigError, match=r"run\.max_steps = 'many': a whole number is expected"):
        config(overrides=("run.max_steps=many",))


def test_the_port_that_rdma_uses_exists() -> None:
    """65536 is none: the kernel would take any free one for it, and firewalls would not let it through."""
    for transport in ("auto", "verbs"):
        with pytest.raises(ConfigError, match=r"65535 is the last one.*65534 or less, or relay.transport to 'tcp'"):
            config("relay", port=65535, transport=transport)
        assert config("relay", port=65534, transport=transport).relay.port == 65534
    assert config("relay", port=65535, transport="tcp").relay.port == 65535


@pytest.mark.parametrize(
    ("text", "name"), [("2026", "2026"), ("2026-11-29", "2026-11-29"), ("warm", "warm"), ("'2026'", "2026")]
)
def test_set_takes_a_number_or_a_date_as_text_where_text_is_wanted(text: str, name: str) -> None:
    assert config(overrides=(f"run.name={text}",)).run.name == name


def test_set_keeps_the_types_of_toml_elsewhere() -> None:
    changed = config(overrides=("run.max_steps=7", "trainer.betas=[0.8, 0.9]", "trainer.deterministic=false"))
    assert (changed.run.max_steps, changed.trainer.betas, changed.trainer.deterministic) == (7, (0.8, 0.9), False)


def test_a_number_in_the_file_where_text_is_wanted_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"run\.name = 2026: a string is expected; put it in quotes"):
        config(name=2026)


@pytest.mark.parametrize(
    ("section", "options", "place"),
    [
        ("reward", {"api_key": "sk-1"}, "reward.options.api_key"),
        ("reward", {"headers": {"Authorization": "Bearer sk-1"}}, "reward.options.headers.Authorization"),
        ("reward", {"judges": [{"hfToken": "sk-1"}]}, "reward.options.judges.hfToken"),
        ("reward", {"url": "https://me:sk-1@host/score"}, "reward.options.url"),
        ("environment", {"db_password": "sk-1"}, "environment.options.db_password"),
        ("prompts", {"token": "sk-1"}, "prompts.options.token"),
    ],
)
def test_a_secret_is_refused_by_its_place_and_never_shown(section: str, options: dict[str, Any], place: str) -> None:
    """Case 63: an API key is found nowhere under the store root; so it must not come in by the config either."""
    with pytest.raises(ConfigError) as refused:
        config(section, options=options)
    assert f"{place} looks like a secret" in str(refused.value)
    assert "variable" in str(refused.value) and "sk-1" not in str(refused.value)


def test_a_store_url_with_a_password_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.store looks like a secret"):
        config(store="s3://me:sk-1@bucket/run")


def test_what_only_names_a_secret_or_looks_like_one_is_taken() -> None:
    options = {"api_key_env": "JUDGE_KEY", "max_tokens": 5, "answer_key": "b", "stop_token": "</s>", "key": 3}
    assert config("reward", options=options).reward.options == options
    assert not any(map(is_secret_name, ("monkey", "tokenizer", "keywords", "secretary", "token_ids")))


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.5), ("top_k", 40), ("min_p", 0.1), ("repetition_penalty", 1.1)]
)
def test_a_sampling_distribution_that_the_trainer_cannot_repeat_is_refused(name: str, value: float) -> None:
    """Case 10: top_p 0.5: rejected with a clear error, which names the key, the value and the one that works."""
    with pytest.raises(ConfigError, match=rf"sampling\.{name} = {value} .* set it to"):
        config("sampling", **{name: value})


def test_a_value_of_set_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "tiny"\n[trainer]\nlearning_rat = 1e-4\n')
    wrong = ["run.seeed=1", "rollouts.workers=2", "sampling.temperature=-1"]
    with pytest.raises(ConfigError) as failed:
        load_config_with(path, wrong)
    lines = sorted(str(failed.value).splitlines())
    assert [line.partition(": ")[0] for line in lines] == ["--set", "--set", "--set", str(path)]
    assert "did you mean 'learning_rate'?" in lines[-1]


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("sampling", {"temperature": -1.0}, r"sampling\.temperature = -1\.0: must be at least 0\.01; raise it"),
        ("sampling", {"samples_per_prompt": 121}, r"samples_per_prompt = 121: may be at most 120; lower it"),
        ("trainer", {"learning_rate": 0}, r"learning_rate = 0: must be more than 0; raise it"),
        ("sampling", {"temperature": "hot"}, r"temperature = 'hot': a number is expected"),
        ("run", {"max_steps": 1.5}, r"max_steps = 1\.5: a whole number is expected"),
        ("trainer", {"deterministic": "perhaps"}, "true or false is expected"),
        ("rollout", {"engine": "sglang"}, "engine = 'sglang': it must be 'vllm' or 'transformers'"),
        ("coordination", {"endpoints": "node1:2379"}, r"a list is expected; write it as \[ \.\.\. \]"),
        ("reward", {"options": 5}, r"a table is expected; write it as \{ \.\.\. \}"),
    ],
)
def test_what_is_expected_instead_is_said(section: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(section, **values)


def test_what_stands_in_place_of_a_section_is_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('trainer = 5\n[model]\npath = "tiny"\n')
    with pytest.raises(ConfigError) as failed:
        load_config_with(path, ["trainer.learning_rate=1e-4"])
    assert str(failed.value).startswith(f"{path}: trainer = 5: a section is expected; write [trainer] with a line")
