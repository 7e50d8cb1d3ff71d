"""What is asked of single values of the config: how a text of `--set` is read, that no secret is among them, and how a
value that is refused is explained.

`run.json` keeps the whole config where everybody who reads the store can see it, so a secret is named in the config
by the environment variable that holds it, never written there.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticKnownError

from laminar.errors import ConfigError

SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:api[_-]?key|apikey|access[_-]?key|private[_-]?key|key|token|secret|password|passwd|credentials?|"
    r"authorization|bearer)$",
    re.IGNORECASE,
)
"""Names whose values are taken for secrets. `api_key_env` is none: it holds the name of a variable."""
NO_SECRET = re.compile(r"(?:answer|prompt|sort|group|json|primary|eos|bos|pad|stop|end|start|think)[_-](?:key|token)$")
"""Names that end like a secret's and are none, such as `answer_key` and `stop_token`."""
SECRET_URL = re.compile(r"[a-z][a-z0-9+.\-]*://[^/\s@]*:[^/\s@]+@", re.IGNORECASE)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def find_secret(value: object, path: str) -> str | None:
    """The dotted path of the first text under `value` that looks like a secret; None if there is none."""
    return next(_secrets(value, path, ""), None)


def _secrets(value: object, path: str, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets(inner, f"{path}.{key}", str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for inner in value:
            yield from _secrets(inner, path, name)
    elif isinstance(value, str) and value and (is_secret_name(name) or SECRET_URL.match(value)):
        yield path


def is_secret_name(name: str) -> bool:
    """Whether a value of this name is taken for a secret: `api_key`, `hfToken`, `Authorization`, …"""
    words = CAMEL.sub("_", name)
    return bool(SECRET_NAME.search(words)) and not NO_SECRET.search(words.lower())


def refuse_secrets(value: object, path: str, remedy: str) -> None:
    """Raises ValueError naming where a secret stands, never the secret."""
    if (found := find_secret(value, path)) is not None:
        raise ValueError(
            f"{found} looks like a secret, and the whole config is written to run.json, where others can read it: "
            f"take it out of the config; {remedy}"
        )


def read_override(raw: str, annotation: object) -> Any:
    """The value of `--set section.key=RAW` for a field of this type: TOML, or the text itself where a text is wanted
    and RAW is no quoted one (`run.name=2026`), or where RAW is no TOML (`run.name=warm`). A number may be written as
    TOML does not have it (`.5`)."""
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return _number(raw) if _only_numbers(annotation) else raw
    return raw.strip() if _wants_text(annotation) and not isinstance(value, str) else value


def _wants_text(annotation: object) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    return annotation is str


def _number(raw: str) -> float | str:
    """RAW itself if it is none."""
    for kind in (int, float):
        try:
            return kind(raw)
        except ValueError:
            continue
    return raw


def _types_of(annotation: object) -> set[object]:
    """The types that single values of it have, within lists and tables too."""
    parts = get_args(annotation)
    if not parts or get_origin(annotation) is Literal:
        return {annotation}
    values = parts[1:] if get_origin(annotation) is dict else parts
    return set().union(*map(_types_of, values))


def _only_numbers(annotation: object) -> bool:
    return bool(_types_of(annotation) & {int, float}) and _types_of(annotation) <= {int, float, NoneType, Ellipsis}


def refuse_disguised(value: object, annotation: object) -> None:
    """Raises PydanticKnownError where only numbers are meant, and a text or a truth value would pass for one."""
    if not _only_numbers(annotation):
        return
    if isinstance(value, str | bool):
        raise PydanticKnownError("float_type" if float in _types_of(annotation) else "int_type")
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        refuse_disguised(item, annotation)


def overridden(data: Mapping[str, Any], overrides: Sequence[str], tree: type[BaseModel]) -> dict[str, Any]:
    """Parsed TOML with `section.key=value` strings applied to it (values in TOML syntax; bare words are strings). What
    stands in place of a section is left there, for its own error. Raises ConfigError for a string of another form."""
    result = {k: dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    for item in overrides:
        dotted, sign, raw = item.partition("=")
        parts = dotted.strip().split(".")
        if not sign or len(parts) != 2:
            raise ConfigError(f"--set {item!r} is not of the form section.key=value")
        section = result.setdefault(parts[0], {})
        if isinstance(section, dict):
            section[parts[1]] = read_override(raw, annotation_of(tree, *parts))
    return result


def annotation_of(tree: type[BaseModel], section: str, key: str) -> object:
    """The type of a key of the config; None if there is no such key (which is told when the whole is checked)."""
    model = tree.model_fields[section].annotation if section in tree.model_fields else None
    field = model.model_fields.get(key) if isinstance(model, type) and issubclass(model, BaseModel) else None
    return field.annotation if field else None


WANTED = {
    "greater_than_equal": "must be at least {ge}; raise it",
    "greater_than": "must be more than {gt}; raise it",
    "less_than_equal": "may be at most {le}; lower it",
    "less_than": "must be less than {lt}; lower it",
    "finite_number": "a finite number is expected",
    "string_type": "a string is expected; put it in quotes",
    "literal_error": "it must be {expected}",
    "list_type": "a list is expected; write it as [ ... ]",
    "tuple_type": "a list is expected; write it as [ ... ]",
    "dict_type": "a table is expected; write it as {{ ... }}",
    "bool_type": "true or false is expected",
    "bool_parsing": "true or false is expected",
    "int_type": "a whole number is expected",
    "int_parsing": "a whole number is expected",
    "int_from_float": "a whole number is expected",
    "int_parsing_size": "such a number cannot be meant; lower it",
    "float_type": "a number is expected",
    "float_parsing": "a number is expected",
}
"""By pydantic's name of an error: what is expected instead."""


def explain_all(errors: ValidationError, tree: type[BaseModel], *, origin: str, overrides: Sequence[str] = ()) -> str:
    """A line for each of pydantic's errors. `origin`: where the values are from, but for those of `overrides`
    (`section.key=value`)."""
    names = {item.partition("=")[0].strip() for item in overrides}
    lines = (f"{_origin_of(error, names) or origin}: {explain(error, tree)}" for error in errors.errors())
    return "\n".join(lines)


def _origin_of(error: Any, overridden: Collection[str]) -> str:
    """`--set` if the value came by it, or the unknown section; else empty."""
    names = [str(part) for part in error["loc"][:2]]
    sections = {key.partition(".")[0] for key in overridden}
    unknown = len(names) == 1 and error["type"] == "extra_forbidden" and names[0] in sections
    return "--set" if unknown or ".".join(names) in overridden else ""


def explain(error: Any, tree: type[BaseModel]) -> str:
    """One of pydantic's errors, in words: the key, what it was, what is expected, or the near key of a misspelt one."""
    where = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _known_keys(tree, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {where!r}; {hint}"
    if error["type"] == "missing":
        return f"{where!r} is missing; add it"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message
    if error["type"] == "model_type":
        wanted = f"a section is expected; write [{where}] with a line for each key below it"
    elif error["type"] in WANTED:
        limits = {k: f"{v:.12g}" if isinstance(v, float) else v for k, v in error.get("ctx", {}).items()}
        wanted = WANTED[error["type"]].format(**limits)
    else:
        wanted = message
    return f"{where} = {error.get('input')!r}: {wanted}"


def _known_keys(tree: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    model = tree
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)
