"""Rewards: what counts as a number, as parts, and as no result."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from laminar.config import EnvironmentConfig, RewardConfig
from laminar.errors import ConfigError, EnvironmentFailure
from laminar.workers.environments.base import Prompt, Score, Transcript
from laminar.workers.environments.host import EnvironmentHost
from laminar.workers.environments.rewards import NoResult, build_reward, extracted, load_object, total


def said(*replies: str) -> Transcript:
    return Transcript(list(replies), [], "stop")


def test_weighted_parts_give_the_total_and_stay_apart() -> None:
    """Case 46: reward weights 1 and 0.1: the total is the weighted one, parts apart."""
    score = total({"right": 1.0, "short": 0.5}, {"right": 1.0, "short": 0.1})
    assert score.reward == pytest.approx(1.05)
    assert score.parts == {"right": 1.0, "short": 0.5}
    assert total(Score(9.0, {"right": 1.0, "short": 0.5}), {"right": 1.0, "short": 0.1}) == score
    with pytest.raises(ValueError, match=r"names \['rihgt'\], the reward returned \['right'\]"):
        total({"right": 1.0}, {"rihgt": 1.0})
    with pytest.raises(TypeError, match="weights is set"):
        total(1.0, {"right": 1.0})


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array(1)])
def test_numbers_of_many_kinds_are_rewards(value: object) -> None:
    assert total(value) == Score(1.0)


def test_a_sequence_is_summed_over_turns() -> None:
    assert total([0.5, 1]) == Score(1.5, {"turn_0": 0.5, "turn_1": 1.0})


@pytest.mark.parametrize("value", ["1", 1j, {"a": None}, {}, [], object(), float("nan"), Score(float("inf")), 10**400])
def test_what_is_not_a_finite_number_is_an_error(value: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        total(value)


def test_none_is_no_result() -> None:
    with pytest.raises(NoResult):
        total(None)


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("3 + 4 = 7", "last_integer", "7"),
        ("10-7", "last_integer", "7"),
        ("it is -12.", "last_integer", "-12"),
        ("about 1,204", "last_integer", "1,204"),
        ("none", "last_integer", None),
        ("a\n b \n\n", "line", "b"),
        ("\n", "line", None),
        (" a\n", "raw", " a\n"),
    ],
)
def test_answers_are_extracted(text: str, how: str, answer: str | None) -> None:
    assert extracted(text, how) == answer


def test_exact_compares_up_to_white_space() -> None:
    exact = build_reward("exact", {}, timeout=1)
    assert exact(Prompt(0, "reverse abc", "cba"), said("abc", " cba\n")) == Score(1.0)
    assert exact(Prompt(0, "reverse abc", "cba"), said("cba.")) == Score(0.0)
    assert exact(Prompt(0, "reverse abc", "cba"), Transcript([], [], "length")) == Score(0.0)
    with pytest.raises(ValueError, match=r"prompt 9 has no answer.*prompts\.answer_column"):
        exact(Prompt(9, "reverse abc", ""), said(""))
    last = build_reward("exact", {"extract": "last_integer"}, timeout=1)
    assert last(Prompt(0, "3+4", "7"), said("3+4 is 7!")) == Score(1.0)


def test_reasoning_gym_scores_by_its_own_rules() -> None:
    reward = build_reward("reasoning-gym", {}, timeout=1)
    entry = {"question": "4 - 1 =", "answer": "3", "metadata": {}}
    prompt = Prompt(0, "4 - 1 =", "3", {"dataset": "chain_sum", "entry": entry})
    assert reward(prompt, said("4 - 1 = 03")).reward == 1.0
    assert reward(prompt, said("4 - 1 = 2")).reward < 0.1
    assert reward(prompt, said("I do not know")).reward == 0.0
    with pytest.raises(ValueError, match="no 'dataset' in its metadata"):
        reward(Prompt(5, "x"), said("3"))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("exact", {"extract": "lastinteger"}, "did you mean 'last_integer'"),
        ("exact", {"extrakt": "raw"}, "extrakt"),
        ("exact", {"weights": {"a": "b"}}, "the weight of 'a' is str"),
        ("exact", {"weights": 3}, "expected a table"),
        ("http", {}, "http:// or https://"),
        ("http", {"url": "http://127.0.0.1/", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ("json:loads", {"no_such": 1}, "does not take"),
        ("no_such_module_x:f", {}, "No module named 'no_such_module_x'"),
        ("json:JSONDecodr", {}, "did you mean 'JSONDecoder'"),
    ],
)
def test_options_that_do_not_fit_are_named(name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_reward(name, options, timeout=1)


def test_an_object_is_loaded_by_its_name() -> None:
    assert load_object("json:JSONDecoder.decode", what="x") is json.JSONDecoder.decode


class Judge(BaseHTTPRequestHandler):
    """Answers by the prompt's text: a status, a delay, or the body itself."""

    seen: dict[str, Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen = {"body": body, "authorization": self.headers["Authorization"]}
        order = body["prompt"]
        if order == "slow":
            threading.Event().wait(1.0)
        self.send_response(int(order) if order.isdigit() else 200)
        self.end_headers()
        self.wfile.write(order.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/score"
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_asks_a_server(judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-very-secret-value")
    reward = build_reward("http", {"url": judge, "api_key_env": "JUDGE_API_KEY"}, timeout=5)
    prompt = Prompt(0, '{"reward": 0.5, "parts": {"style": 2}}', "4", {"level": 1})
    assert reward(prompt, said("a", "b")) == Score(0.5, {"style": 2.0})
    assert Judge.seen["body"] == {
        "prompt": prompt.prompt, "answer": "4", "replies": ["a", "b"], "metadata": {"level": 1},
    }  # fmt: skip
    assert Judge.seen["authorization"] == "Bearer sk-very-secret-value"


@pytest.mark.parametrize("order", ["503", "404", "301", "slow", "{}", "[1]", "no json", '{"reward": null}'])
def test_whatever_a_server_refuses_is_no_result(judge: str, order: str) -> None:
    """Case 41: a judge that gives no reward has not given 0."""
    with pytest.raises(NoResult):
        build_reward("http", {"url": judge}, timeout=0.5)(Prompt(0, order), said("x"))


async def test_a_refused_connection_is_no_result_through_the_host(judge: str) -> None:
    """Case 41: the scorer's server refuses the connection: "no result", not reward 0."""
    for url, status in (("http://127.0.0.1:9/", "reward_no_result"), (judge, "reward_error")):
        config = RewardConfig(name="http", options={"url": url}, timeout=20)
        host = EnvironmentHost(EnvironmentConfig(), config, workers=1)
        await host.start()
        try:
            with pytest.raises(EnvironmentFailure) as caught:
                await asyncio.wait_for(host.score(Prompt(0, '{"reward": NaN}'), said("x")), 20)
            assert caught.value.status == status
        finally:
            await host.close()
