"""From messages to tokens, token-exact over turns.

    prompt_ids(messages)   <|user|> … <|assistant|>                      the first prompt, as the template writes it
    policy writes                                   REPLY <|end|>        kept as sampled, never tokenised again
    turn_ids(messages)                                         \\n<|tool|> … <|end|>\\n<|assistant|>

The tokens between two policy turns are what the template puts between them: it is rendered with a marker in place of
the reply, and what follows the marker is tokenised, less the end-of-turn token that the policy wrote. Whether this
equals the template's rendering of the whole conversation is measured once, on a probe conversation: a template that
rewrites earlier turns (such as one that strips thinking) cannot agree with what the policy saw. `template_policy`
says what happens then; `report` says what was found.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2

from laminar.errors import ConfigError, EnvironmentFailure
from laminar.workers.environments.base import Message

log = logging.getLogger(__name__)

TemplatePolicy = Literal["splice", "refuse"]
_MARKER = "Xq7reply"
"""Stands for a policy's reply; ordinary letters, which templates do not alter."""
_THOUGHT = "Zk4thought"


@dataclass(frozen=True)
class TemplateReport:
    """What the probe conversation showed of a chat template.

    `spliced_equals_full`: spliced tokens are those of the whole conversation's rendering.
    `rewrites_history`: the template changes earlier turns (strips thinking, drops the generation prompt); what the
    policy saw and wrote is kept. `detail` describes the first difference, empty if there is none.
    """

    spliced_equals_full: bool
    rewrites_history: bool
    detail: str = ""


class Conversation:
    """One chat template with its options. Safe to share between threads.

    `tokenizer` is a Hugging Face tokenizer with a chat template; `options` are keyword arguments of the template;
    `system` is put before conversations that have no system message of their own, empty for none.
    Raises ConfigError if there is no chat template, if it does not keep a reply's text, or if `template_policy` is
    "refuse" and spliced tokens differ from the template's.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any] | None = None,
        system: str = "",
        *,
        template_policy: TemplatePolicy = "splice",
    ) -> None:
        if template_policy not in ("splice", "refuse"):
            raise ConfigError(f"template_policy = {template_policy!r} is unknown; use 'splice' or 'refuse'")
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._system = system
        self._lock = threading.Lock()
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot become tokens; use an instruction-tuned model, "
                "or put a chat_template.jinja beside its tokenizer"
            )
        _check_options(tokenizer.chat_template, self._options)
        self._leading_bos = _leading_bos(tokenizer)
        self.end_of_turn_id = _end_of_turn_id(tokenizer, self._render)
        """The special token with which the template ends an assistant's turn; None if it uses plain text for it."""
        self.report = self._probe()
        if not self.report.spliced_equals_full:
            if template_policy == "refuse":
                raise ConfigError(f"the chat template cannot be spliced exactly: {self.report.detail}")
            log.warning(
                "in conversations of several turns tokens are spliced as the policy wrote them, which differs from the "
                "chat template's own rendering of the whole conversation: %s",
                self.report.detail,
            )

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation so far and the generation prompt, with exactly one BOS if the model has one.

        Raises ConfigError if the template refuses the messages."""
        return self._encode_prompt(self._render(self._with_system(messages), generate=True))

    def turn_ids(self, messages: Sequence[Message], reply_ids: Sequence[int] | None = None) -> list[int]:
        """Token ids to append after a policy turn: its closing, the environment's `messages`, the generation prompt.

        The end-of-turn token is left out as the policy wrote it; give the policy's `reply_ids` if it may have stopped
        otherwise (by a stop text, or another stop token), and the token is added where it is missing."""
        text = self._render([_user("x"), _assistant(_MARKER), *messages], generate=True)
        ids = self._encode(_after(text, _MARKER))
        end = self.end_of_turn_id
        if end is None or end not in ids or (reply_ids is not None and (not reply_ids or reply_ids[-1] != end)):
            return ids
        return ids[ids.index(end) + 1 :]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens; white space as it is."""
        with self._lock:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self._system and (not messages or messages[0]["role"] not in ("system", "developer")):
            return [{"role": "system", "content": self._system}, *messages]
        return list(messages)

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        with self._lock:
            return _render(self._tokenizer, messages, generate, self._options)

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _encode_prompt(self, text: str) -> list[int]:
        return _with_one_bos(self._encode(text), self._tokenizer.bos_token_id, self._leading_bos)

    def _probe(self) -> TemplateReport:
        """Splice three turns and compare with the template's rendering of all of them."""
        second = [self._first_accepted(_user("three"))]
        third = [_user("five")]
        opening = self._with_system([_user("one")])
        replies = ["two", "four"]
        spliced = self.prompt_ids(opening)
        closing = [] if self.end_of_turn_id is None else [self.end_of_turn_id]
        for reply, messages in zip(replies, (second, third), strict=True):
            spliced += [*self._encode(reply), *closing, *self.turn_ids(messages)]
        whole = [*opening, _assistant(replies[0]), *second, _assistant(replies[1]), *third]
        full = self.prompt_ids(whole)
        detail = self._history_change(opening)
        rewrites = bool(detail)
        if spliced != full and not detail:
            detail = self._difference(spliced, full)
        return TemplateReport(spliced == full and not rewrites, rewrites, detail)

    def _history_change(self, opening: Sequence[Message]) -> str:
        """How the template treats a turn once it is history; empty if as it was."""
        prompt = self._render(opening, generate=True)
        thinking = [*opening, _assistant(f"<think>{_THOUGHT}</think>{_MARKER}"), _user("x")]
        if _THOUGHT not in self._render(thinking, generate=True):
            return "the template strips the thinking of earlier turns"
        if not self._render([*opening, _assistant(_MARKER), _user("x")], generate=True).startswith(prompt):
            begun = prompt.removeprefix(self._render(opening, generate=False))
            return f"the template writes the beginning of earlier turns otherwise than its generation prompt {begun!r}"
        return ""

    def _first_accepted(self, fallback: Message) -> Message:
        """A tool's message where the template knows tools, since those are what environments mostly send."""
        tool = {"role": "tool", "content": fallback["content"]}
        try:
            self._render([_user("x"), _assistant("y"), tool], generate=True)
        except ConfigError:
            return fallback
        return tool

    def _difference(self, spliced: Sequence[int], full: Sequence[int]) -> str:
        shorter = min(len(spliced), len(full))
        at = next((i for i in range(shorter) if spliced[i] != full[i]), shorter)
        with self._lock:
            shown = [self._tokenizer.decode(list(ids[max(0, at - 2) : at + 4])) for ids in (spliced, full)]
        return f"at token {at} splicing gives {shown[0]!r}, the template {shown[1]!r}"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder, without code of its own. Raises ConfigError if it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {error}") from error


def stop_token_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """All token ids at which a turn ends, ascending: those of the generation config (a number, a list, or none), the
    tokenizer's EOS, and the template's end of turn. An EOS that is also the pad token stops like any other.

    `generation_config` is a Hugging Face GenerationConfig, its mapping, the folder of a model, or None.
    Raises ConfigError if no token would end a turn."""
    if isinstance(generation_config, Path):
        generation_config = _generation_config(generation_config)
    if isinstance(generation_config, Mapping):
        given = generation_config.get("eos_token_id")
    else:
        given = getattr(generation_config, "eos_token_id", None)
    stops = {int(i) for i in (given if isinstance(given, list | tuple) else [given]) if i is not None}
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    if getattr(tokenizer, "chat_template", None):
        end = _end_of_turn_id(tokenizer, lambda messages, generate: _render(tokenizer, messages, generate, {}))
        stops |= {end} if end is not None else set()
    if not stops:
        raise ConfigError("the model has no end-of-sequence token, so no turn would ever stop; set its eos_token_id")
    return sorted(stops)


def _generation_config(folder: Path) -> Mapping[str, Any]:
    """`generation_config.json`, or, where a model has none, its `config.json`, which then holds the same keys."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / name} cannot be read: {error}") from error
        if isinstance(found, dict):
            return found
    return {}


@contextmanager
def said_by_environment() -> Iterator[None]:
    """What the chat template refuses in the block fails one trajectory, whose environment said it, and not the run."""
    try:
        yield
    except ConfigError as error:
        raise EnvironmentFailure("environment_error", str(error)) from error


def _render(tokenizer: Any, messages: Sequence[Message], generate: bool, options: Mapping[str, Any]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generate, **options
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ConfigError(
            f"the chat template refuses messages with the roles {roles}: {error}; if it knows no system message, leave "
            "prompts.system empty; if it knows no tools, let the environment answer as user"
        ) from error
    return text


def _end_of_turn_id(tokenizer: Any, render: Callable[..., str]) -> int | None:
    closing = _after(render([_user("x"), _assistant(_MARKER)], generate=False), _MARKER)
    special = set(tokenizer.all_special_ids) | {
        index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
    }
    ids = tokenizer.encode(closing, add_special_tokens=False)
    return next((int(i) for i in ids if i in special), None)


def _after(text: str, marker: str) -> str:
    _, found, rest = text.rpartition(marker)
    if not found:
        raise ConfigError("the chat template drops the text of an assistant's message, so turns cannot be spliced")
    return rest


def _leading_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts a BOS before text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("x", add_special_tokens=True)[:1] == [bos]


def _with_one_bos(ids: list[int], bos: int | None, leading: bool) -> list[int]:
    """One BOS: a template and a tokenizer may both write one, or each leave it to the other."""
    if bos is None:
        return ids
    start = 0
    while ids[start : start + 2] == [bos, bos]:
        start += 1
    return [bos, *ids] if leading and ids[:1] != [bos] else ids[start:]


def _check_options(template: str | Mapping[str, str], options: Mapping[str, Any]) -> None:
    """A keyword that the template never reads would be dropped in silence."""
    text = template if isinstance(template, str) else "\n".join(template.values())
    for name in options:
        if name not in text:
            raise ConfigError(
                f"sampling.chat_template_options.{name} is not read by the model's chat template; remove it or check "
                "its spelling"
            )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
