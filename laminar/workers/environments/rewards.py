"""Rewards: from a finished transcript to a number, or to the statement that there is none.

A reward is a callable `(prompt, transcript)`; it runs in a scoring process, where it may block, raise or loop.
It may return a number, a `Score`, a mapping of named parts, a sequence of numbers (one a turn, summed), or None for
"no result"; `total` makes a `Score` of each. Raising `NoResult`, or failing to reach a server, is "no result" as well:
a judge that cannot be asked has not given 0.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from laminar.errors import ConfigError
from laminar.workers.environments.base import Prompt, Score, Transcript

Reward = Callable[[Prompt, Transcript], object]

FLOAT32_MAX = 3.4028234663852886e38
_INTEGER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*")
_EXTRACTS = ("auto", "last_integer", "line", "raw")


class NoResult(Exception):
    """The reward cannot be told: a judge refused, a server was away. Never the same as a reward of 0."""


class _ScoredDataset(Protocol):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def load_object(name: str, *, what: str) -> Any:
    """The object `module:name`. Raises ConfigError naming it, with the last line of what importing it raised."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{what} {name!r} is neither built in nor of the form module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except BaseException as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"{what} {name!r}: importing {module_name} failed: {last_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "check its spelling"
            raise ConfigError(f"{what} {name!r}: {module_name} has no {part!r}; {hint}")
        found = getattr(found, part)
    return found


def last_line(error: BaseException) -> str:
    """`Type: message` of an exception, on one line."""
    try:
        text = str(error)
    except Exception:  # a user's exception whose own __str__ raises must not end the scoring process
        text = "(its message cannot be shown)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = type(error).__name__
    return f"{kind}: {lines[-1]}" if lines else kind


def build_reward(name: str, options: Mapping[str, Any], *, timeout: float) -> Callable[[Prompt, Transcript], Score]:
    """The configured reward with its weights applied. `timeout` in seconds is the limit of a whole call.

    `options` are keyword arguments of the reward, except `weights`: a table of part name -> weight.
    Raises ConfigError for an unknown name or for options that the reward does not take.
    """
    rest = dict(options)
    weights = _checked_weights(rest.pop("weights", None))
    builders: dict[str, Callable[..., Reward]] = {
        "reasoning-gym": ReasoningGymReward,
        "exact": ExactReward,
        "http": functools.partial(HttpReward, limit=timeout),
    }
    if name in builders:
        reward: Reward = _with_options(builders[name], rest, name)
    elif ":" in name:
        reward = _user_reward(name, rest)
    else:
        near = difflib.get_close_matches(name, list(builders), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in are {', '.join(builders)}; else give module:name"
        raise ConfigError(f"reward.name = {name!r} is unknown; {hint}")
    return lambda prompt, transcript: total(reward(prompt, transcript), weights)


def total(value: object, weights: Mapping[str, float] | None = None) -> Score:
    """What a reward returned, as a Score: the weighted total, and the unweighted parts.

    Raises NoResult for None, and TypeError or ValueError for what is not a finite float32, naming the part.
    """
    if inspect.isawaitable(value):
        import asyncio

        async def awaited() -> object:
            return await value

        return total(asyncio.run(awaited()), weights)
    if value is None:
        raise NoResult("the reward returned None")
    if isinstance(value, Score):
        parts = {str(k): _number(v, f"part {k!r}") for k, v in value.parts.items()}
        reward = _weighted(parts, weights) if weights else _number(value.reward, "the reward")
        return Score(reward, parts)
    if isinstance(value, Mapping):
        parts = {str(k): _number(v, f"part {k!r}") for k, v in value.items()}
        if not parts:
            raise ValueError("the reward returned no parts")
        return Score(_weighted(parts, weights) if weights else _number(sum(parts.values()), "the sum of parts"), parts)
    if weights:
        raise TypeError(f"reward.options.weights is set, but the reward returned {type(value).__name__}, not parts")
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        numbers = [_number(v, f"the reward of turn {i}") for i, v in enumerate(value)]
        if not numbers:
            raise ValueError("the reward returned an empty sequence")
        parts = {f"turn_{i}": number for i, number in enumerate(numbers)}
        return Score(_number(sum(numbers), "the sum over turns"), parts)
    return Score(_number(value, "the reward"))


def is_unreachable(error: BaseException) -> bool:
    """Whether an exception of a user's code says that a server could not be reached."""
    if isinstance(error, NoResult | ConnectionError | socket.gaierror):
        return True
    httpx = sys.modules.get("httpx")
    if httpx is not None and isinstance(error, httpx.TransportError):
        return True
    if not isinstance(error, OSError):
        return False
    # urllib and requests wrap the refusal in an OSError of their own.
    reasons = (error.__cause__, error.__context__, getattr(error, "reason", None))
    wraps_refusal = any(isinstance(reason, BaseException) and is_unreachable(reason) for reason in reasons)
    return wraps_refusal or type(error).__name__ == "ConnectionError"


def extracted(text: str, how: str) -> str | None:
    """The answer within a reply: its last integer, its last line that is not empty, or all of it. None: it has none."""
    if how == "raw":
        return text
    if how == "line":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None
    found = _INTEGER.findall(text)
    return found[-1] if found else None


class ReasoningGymReward:
    """`score_answer` of the prompt's data set. `extract = "auto"` takes the last integer where the answer is one,
    else the last line. The prompt's metadata hold `dataset`, `entry` and, if any, `options` (`sources` writes them)."""

    def __init__(self, extract: str = "auto") -> None:
        self._extract = _checked_extract(extract)
        self._datasets: dict[str, _ScoredDataset] = {}

    def __call__(self, prompt: Prompt, transcript: Transcript) -> float:
        try:
            name, entry = prompt.metadata["dataset"], prompt.metadata["entry"]
        except KeyError as missing:
            raise ValueError(
                f"prompt {prompt.prompt_index} has no {missing} in its metadata: the reasoning-gym reward scores "
                "prompts of the reasoning-gym source only; set reward.name to 'exact' or to a reward of your own"
            ) from missing
        how = self._extract
        if how == "auto":
            how = "last_integer" if _INTEGER.fullmatch(str(entry["answer"]).strip()) else "line"
        answer = extracted(transcript.replies[-1] if transcript.replies else "", how)
        if answer is None:
            return 0.0
        return float(self._dataset(name, prompt.metadata.get("options", {})).score_answer(answer, entry))

    def _dataset(self, name: str, options: Mapping[str, Any]) -> _ScoredDataset:
        key = json.dumps([name, options], sort_keys=True)
        if key not in self._datasets:
            import reasoning_gym

            self._datasets[key] = reasoning_gym.create_dataset(name, size=1, seed=0, **options)
        return self._datasets[key]


class ExactReward:
    """1 if the reply, or what `extract` takes of it, equals the answer up to surrounding white space; else 0."""

    def __init__(self, extract: str = "raw") -> None:
        self._extract = _checked_extract(extract)
        if extract == "auto":
            raise ConfigError("reward.options.extract = 'auto' is for reasoning-gym; use last_integer, line or raw")

    def __call__(self, prompt: Prompt, transcript: Transcript) -> float:
        if not prompt.answer.strip():
            raise ValueError(f"prompt {prompt.prompt_index} has no answer to compare with; check prompts.answer_column")
        answer = extracted(transcript.replies[-1] if transcript.replies else "", self._extract)
        return float(answer is not None and answer.strip() == prompt.answer.strip())


class HttpReward:
    """POST {prompt, answer, replies, metadata} as JSON to `url`, which answers {"reward": number, "parts": {}}.

    A refused connection, a time-out, any status but 2xx and an answer without a reward are "no result".
    `api_key_env` names the environment variable whose value is sent as a bearer token: the key stays out of the config.
    """

    def __init__(
        self,
        url: str = "",
        timeout: float = 0.0,
        headers: Mapping[str, str] | None = None,
        api_key_env: str = "",
        *,
        limit: float,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.options.url = {url!r}: the http reward needs an http:// or https:// address")
        import httpx

        sent = dict(headers or {})
        if api_key_env:
            if api_key_env not in os.environ:
                raise ConfigError(f"reward.options.api_key_env = {api_key_env!r} is not set in the environment")
            sent["Authorization"] = f"Bearer {os.environ[api_key_env]}"
        self._url = url
        # Shorter than the limit of the whole call, so that a slow server gives "no result" and keeps its process.
        self._client = httpx.Client(timeout=timeout or 0.8 * limit, headers=sent)

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        import httpx

        body = {
            "prompt": prompt.prompt,
            "answer": prompt.answer,
            "replies": transcript.replies,
            "metadata": prompt.metadata,
        }
        try:
            response = self._client.post(self._url, json=body)
            response.raise_for_status()
            data = response.json()
        except httpx.HTTPStatusError as error:
            raise NoResult(f"{self._url} answered {error.response.status_code}") from error
        except (httpx.HTTPError, ValueError) as error:
            raise NoResult(f"{self._url}: {last_line(error)}") from error
        if not isinstance(data, dict) or data.get("reward") is None:
            raise NoResult(f"{self._url} answered without a `reward`")
        return Score(data["reward"], data.get("parts") or {})


def _user_reward(name: str, options: dict[str, Any]) -> Reward:
    found = load_object(name, what="reward.name =")
    if inspect.isclass(found):
        found = _with_options(found, options, name)
    elif options:
        found = functools.partial(found, **options)
    if not callable(found):
        raise ConfigError(f"reward.name = {name!r} is {type(found).__name__}, not a function (prompt, transcript)")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"reward.name = {name!r} does not take (prompt, transcript) and its options: {error}"
        ) from error
    except ValueError:  # a callable of C has no signature to check
        pass
    reward: Reward = found
    return reward


def _with_options(builder: Callable[..., Any], options: dict[str, Any], name: str) -> Any:
    try:
        inspect.signature(builder).bind(**options)
    except TypeError as error:
        raise ConfigError(f"reward.options of {name!r}: {error}") from error
    return builder(**options)


def _checked_extract(extract: str) -> str:
    if extract not in _EXTRACTS:
        near = difflib.get_close_matches(str(extract), _EXTRACTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_EXTRACTS)}"
        raise ConfigError(f"reward.options.extract = {extract!r} is unknown; {hint}")
    return extract


def _checked_weights(weights: object) -> dict[str, float] | None:
    if weights is None:
        return None
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"reward.options.weights = {weights!r}: expected a table of part name -> number")
    try:
        return {str(name): _number(weight, f"the weight of {name!r}") for name, weight in weights.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.options.weights: {error}") from error


def _weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    if set(parts) != set(weights):
        raise ValueError(f"reward.options.weights names {sorted(weights)}, the reward returned {sorted(parts)}")
    return _number(sum(weight * parts[name] for name, weight in weights.items()), "the weighted total")


def _number(value: object, what: str) -> float:
    if isinstance(value, str | bytes | complex):
        raise TypeError(f"{what} is {type(value).__name__} {value!r:.60}, not a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} is {type(value).__name__} {value!r:.60}, not a number") from error
    if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
        raise ValueError(f"{what} is {number}, not a finite float32")
    return number
