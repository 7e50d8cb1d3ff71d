"""The calculator: an environment of several turns that answers whatever the policy writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.config import EnvironmentConfig, RewardConfig
from laminar.workers.environments.base import Prompt, Score, Transcript
from laminar.workers.environments.calculator import INSTRUCTION, LENGTH_LIMIT, Calculator, observation
from laminar.workers.environments.host import EnvironmentHost

PROMPT = Prompt(0, "What is 3*(2+5)?", "21")


def calculator(**options: object) -> Calculator:
    return Calculator(reward=lambda prompt, transcript: Score(1.0), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3*(2+5)", "21"), ("-7/2", "-3.5"), ("6/3", "2"), ("2**10", "1024"), ("1.5+1.5", "3"), (" 4 - -1 ", "5")],
)
def test_expressions_are_evaluated(expression: str, value: str) -> None:
    assert observation(expression) == value


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("", "the expression is empty"),
        ("1/0", "division by zero"),
        ("2**", "is not an expression"),
        ("__import__('os').getcwd()", "is not a number, + - * / ** or parentheses"),
        ("9**9**9**9", "the exponent"),
        ("10**15*10", "a value is beyond"),
        ("(-1)**0.5", "not a real number"),
        ("1e400", "a value is beyond"),
        ("True+1", "is not a number"),
        ("1+" * LENGTH_LIMIT + "1", f"the limit is {LENGTH_LIMIT}"),
        ("(" * 150 + "1" + ")" * 40, "is not an expression"),
        ('{"expression": 3}', "must be a string, not int"),
        ('{"expr": "1+1"}', "the argument 'expression' is missing; given were ['expr']"),
        ('{"expression": "1+1"', "the arguments are not valid JSON"),
        ("{}", "'expression' is missing"),
    ],
)
def test_bad_arguments_give_an_observation(argument: str, told: str) -> None:
    """Case 56: arguments malformed or missing: an observation that says so, not a crash."""
    answer = observation(argument)
    assert answer.startswith("error: ") and told in answer


def test_arguments_may_be_json() -> None:
    """Case 56: tool arguments as a JSON string."""
    assert observation('{"expression": "1+1"}') == observation('"1+1"') == "2"


@given(st.text(max_size=60) | st.text("0123456789+-*/(). e", max_size=60))
def test_no_reply_makes_it_raise(text: str) -> None:
    turn = calculator().step(PROMPT, '{"calls": 0}', f"<calc>{text}</calc>")
    assert not turn.done and turn.messages[0]["role"] == "tool"
    calculator().step(PROMPT, '{"calls": 0}', text)


def test_a_reply_without_a_call_ends_it() -> None:
    assert calculator().step(PROMPT, '{"calls": 1}', "21").done


def test_a_call_that_is_never_closed_is_told() -> None:
    turn = calculator().step(PROMPT, '{"calls": 0}', "<calc>1+1")
    assert not turn.done and "has no </calc>" in turn.messages[0]["content"]


def test_calls_are_counted_in_the_state_and_bounded() -> None:
    environment = calculator(calls=3)
    turn = environment.step(PROMPT, '{"calls": 0}', "<calc>1+1</calc> and <calc>2+2</calc>")
    assert turn.messages[0]["content"] == "2\n4" and turn.state == '{"calls": 2}'
    turn = environment.step(PROMPT, turn.state, "<calc>3</calc><calc>4</calc>")
    assert turn.messages[0]["content"] == "3"
    turn = environment.step(PROMPT, turn.state, "<calc>5</calc>")
    assert "all 3 calls are used" in turn.messages[0]["content"]


def test_the_instruction_joins_the_first_message() -> None:
    assert calculator().reset(PROMPT).messages == [{"role": "user", "content": f"{INSTRUCTION}\n\n{PROMPT.prompt}"}]
    own = Prompt(0, '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]')
    messages = calculator(role="user").reset(own).messages
    assert [m["role"] for m in messages] == ["system", "user"]
    assert messages[0]["content"] == f"Be brief.\n\n{INSTRUCTION}"


async def test_a_conversation_through_the_host() -> None:
    host = EnvironmentHost(
        EnvironmentConfig(name="calculator", options={"calls": 2}),
        RewardConfig(name="exact", options={"extract": "last_integer"}),
        workers=1,
    )
    await host.start()
    try:
        assert host.resume == "state"
        turn = await host.reset(PROMPT)
        turn = await host.step(PROMPT, turn.state, "<calc>3*(2+5)</calc>")
        assert turn.messages == [{"role": "tool", "content": "21"}]
        last = await host.step(PROMPT, turn.state, "It is 21.")
        assert last.done
        score = await host.score(PROMPT, Transcript(["<calc>3*(2+5)</calc>", "It is 21."], [], "stop", last.state))
        assert score.reward == 1.0
    finally:
        await host.close()
