"""A worked example of several turns: the policy may write `<calc>EXPRESSION</calc>` and reads the value a turn later.

Its state is the number of calls so far, as JSON: enough for another worker to go on after a death between two turns.
Whatever the policy writes is answered with an observation, never with an exception.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable

from laminar.workers.environments.base import Message, Prompt, Resume, Score, Transcript, Turn
from laminar.workers.environments.single_turn import prompt_messages

INSTRUCTION = "To calculate, write <calc>EXPRESSION</calc>, such as <calc>3*(2+5)</calc>. Else reply with the answer."
LENGTH_LIMIT = 200
"""Characters of an expression."""
VALUE_LIMIT = 10**15
EXPONENT_LIMIT = 64

Number = int | float
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """`role` is the role of the tool's messages: "user" for chat templates that know no tools.
    `instruct` puts `INSTRUCTION` into the first message; `calls` bounds the calls of a trajectory."""

    resume: Resume = "state"

    def __init__(
        self,
        *,
        reward: Callable[[Prompt, Transcript], Score],
        role: str = "tool",
        instruct: bool = True,
        calls: int = 8,
    ) -> None:
        self._reward = reward
        self._role = role
        self._instruct = instruct
        self._calls = calls

    def reset(self, prompt: Prompt) -> Turn:
        messages = prompt_messages(prompt)
        return Turn(_instructed(messages) if self._instruct else messages, state=json.dumps({"calls": 0}))

    def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
        calls: int = json.loads(state)["calls"]
        arguments = _CALL.findall(reply)
        if not arguments and "<calc>" not in reply:
            return Turn(state=state, done=True)
        if calls >= self._calls:
            answer = f"error: all {self._calls} calls are used; reply with the answer"
        elif not arguments:
            answer = "error: <calc> has no </calc>; write <calc>EXPRESSION</calc>"
        else:
            arguments = arguments[: self._calls - calls]
            answer = "\n".join(observation(argument) for argument in arguments)
        counted = json.dumps({"calls": calls + max(1, len(arguments))})
        return Turn([{"role": self._role, "content": answer}], state=counted)

    def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        return self._reward(prompt, transcript)


def observation(argument: str) -> str:
    """The value of a call's argument, or `error: …` saying what is wrong with it.

    The argument is an expression, or JSON as function-calling models write it: a string, or {"expression": string}."""
    expression: object = argument.strip()
    if argument.strip().startswith(("{", '"')):
        try:
            expression = json.loads(argument)
        except ValueError as error:
            return f"error: the arguments are not valid JSON ({error}); write <calc>EXPRESSION</calc>"
        if isinstance(expression, dict):
            if "expression" not in expression:
                return f"error: the argument 'expression' is missing; given were {sorted(expression)}"
            expression = expression["expression"]
    if not isinstance(expression, str):
        return f"error: 'expression' must be a string, not {type(expression).__name__}"
    if not expression.strip():
        return "error: the expression is empty; write <calc>EXPRESSION</calc>"
    try:
        return _shown(evaluate(expression))
    except (ArithmeticError, ValueError) as error:
        return f"error: {error}"


def evaluate(expression: str) -> Number:
    """Value of an expression of numbers, + - * / ** and parentheses.

    Raises ValueError for anything else or beyond the limits, ZeroDivisionError, OverflowError. Its time is bounded:
    operands and exponents are checked before they are used."""
    if len(expression) > LENGTH_LIMIT:
        raise ValueError(f"the expression has {len(expression)} characters, the limit is {LENGTH_LIMIT}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression.strip()!r} is not an expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > EXPONENT_LIMIT:
            raise ValueError(f"the exponent {right} is beyond {EXPONENT_LIMIT}")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not a number, + - * / ** or parentheses")


def _bounded(value: object) -> Number:
    if not isinstance(value, int | float):
        raise ValueError("the value is not a real number")
    if not abs(value) <= VALUE_LIMIT:  # refuses NaN too
        raise ValueError(f"a value is beyond {VALUE_LIMIT:.0e}")
    return value


def _shown(value: Number) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.10g}"
    return str(value)


def _instructed(messages: list[Message]) -> list[Message]:
    """The instruction goes into the first message, so that the run's own system message keeps its place."""
    first = messages[0]
    joined = [first["content"], INSTRUCTION] if first["role"] == "system" else [INSTRUCTION, first["content"]]
    return [{**first, "content": "\n\n".join(map(str, joined))}, *messages[1:]]
