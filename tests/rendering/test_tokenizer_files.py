"""Settings that a tokenizer's files hold: truncation, padding and side change no row."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from alignment_core.data.kinds import Example
from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.kinds.prompts import Prompt
from alignment_core.data.kinds.texts import Text
from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.recipes import ModelConfig
from alignment_core.stages.base_model import _tidy
from tests.rendering import conversations
from tests.rendering.families import OWN, Family, build
from tests.rendering.installed import MISTRAL
from tests.rendering.rows import rows_of

SAVED = [family for family in OWN if family.name in (
    "llama2", "llama2-legacy", "gemma", "yi", "phi3", "gpt2-chatml", "gpt2-prefix-space", "qwen2.5-base", "llama3-instruct",
    "deepseek-v3", "gpt-oss", "falcon3", "t5", "unigram-no-prefix", "characters", "LlamaTokenizer",
)]  # fmt: skip
"""One or two for each algorithm."""
EXAMPLES: list[Example] = [
    Demonstration([], conversations.THREE_TURNS),
    Preference(conversations.THREE_TURNS[:5], conversations.THREE_TURNS[5:], [{"role": "assistant", "content": "no"}]),
    Prompt(conversations.THREE_TURNS[:3]),
    Text("The capital of France is Paris. " * 5),
]


def _truncated(tokenizer: Any) -> None:
    tokenizer(["How are you?"], truncation=True, max_length=5)


def _padded(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_padding(length=400, pad_id=0)


def _both(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_truncation(7, stride=2, direction="left")
    tokenizer.backend_tokenizer.enable_padding(pad_to_multiple_of=64, direction="left")


@pytest.mark.parametrize("settings", [_truncated, _padded, _both])
@pytest.mark.parametrize("family", SAVED, ids=str, scope="session")
def test_stored_truncation_and_padding_change_nothing(family: Family, settings: Any, tmp_path: Path) -> None:
    """The right rows are those of the same files without these settings, which other tests compare with transformers."""
    tokenizer = build(family)
    tokenizer.save_pretrained(tmp_path / "without")
    settings(tokenizer)
    tokenizer.save_pretrained(tmp_path / "with")
    files = [(tmp_path / name / "tokenizer.json").read_text() for name in ("without", "with")]
    assert files[0] != files[1]
    renderers = [
        Renderer(AutoTokenizer.from_pretrained(tmp_path / name), eos_token_ids=family.stop_ids)
        for name in ("without", "with")
    ]
    for example in EXAMPLES:
        without, with_settings = (rows_of(example, renderer, family) for renderer in renderers)
        assert with_settings == without


def test_a_call_that_truncates_changes_nothing_for_later_rows() -> None:
    """It leaves its limit in the tokenizer, which rows share."""
    (family,) = (candidate for candidate in OWN if candidate.name == "qwen2.5-base")
    tokenizer = build(family)
    renderer = Renderer(tokenizer)
    tokenizer(["How are you today?"], truncation=True, max_length=3)
    for example in EXAMPLES:
        assert rows_of(example, renderer, family) == rows_of(example, Renderer(family.tokenizer), family)


def test_rows_with_tools_use_the_template_named_for_tools() -> None:
    (family,) = (candidate for candidate in OWN if candidate.name == "qwen2.5-base")
    tokenizer, messages = build(family), conversations.THREE_TURNS[:1]
    show = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    tokenizer.chat_template = {"default": family.template, "tool_use": show + str(family.template)}
    tools = [{"type": "function", "function": {"name": "square", "parameters": {"type": "object", "properties": {}}}}]
    for given in (None, tools):
        right = tokenizer.apply_chat_template(
            messages, tools=given, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        (row,) = rows_of(Prompt(messages, tools=given), Renderer(tokenizer), family)
        assert row["prompt_ids"] == list(right["input_ids"])


def test_a_tokenizer_that_renders_no_chat_template_is_refused(tmp_path: Path) -> None:
    """``transformers`` reads folders of Mistral that have no other file than tekken.json by ``mistral_common``."""
    shutil.copy(MISTRAL / "tekken_240911.json", tmp_path / "tekken.json")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(UserError, match="MistralCommonBackend"):
        Renderer(AutoTokenizer.from_pretrained(tmp_path))


def test_a_tokenizer_json_is_read_beside_mistrals_own_file(tmp_path: Path) -> None:
    """``transformers`` prefers tekken.json, as Mistral-Nemo has both; an import leaves it out, for other loaders."""
    (family,) = (candidate for candidate in OWN if candidate.name == "mistral-tekken")
    build(family).save_pretrained(tmp_path)
    shutil.copy(MISTRAL / "tekken_240911.json", tmp_path / "tekken.json")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert type(AutoTokenizer.from_pretrained(tmp_path)).__name__ == "MistralCommonBackend"
    tokenizer = load_tokenizer(tmp_path)
    row = Renderer(tokenizer).prompt(conversations.THREE_TURNS[:1])
    assert row == Renderer(build(family)).prompt(conversations.THREE_TURNS[:1])
    _tidy(tmp_path, ModelConfig(name=str(tmp_path)))
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is type(tokenizer)


def test_a_tokenizer_json_with_the_pattern_of_another_model_splits_words_as_mistrals_own_file(tmp_path: Path) -> None:
    """As that of Mistral-Small-3.1, which has Llama 3's. ``transformers`` mends it if it is told to (`fix_mistral_regex`)."""
    (family,) = (candidate for candidate in OWN if candidate.name == "llama3-instruct")
    build(family).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')

    def words(tokenizer: Any) -> list[str]:
        return [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("CamelCase it's 2024")]

    assert words(load_tokenizer(tmp_path)) == ["CamelCase", "Ġit", "'s", "Ġ", "202", "4"]
    shutil.copy(MISTRAL / "tekken_240911.json", tmp_path / "tekken.json")
    right = ["Camel", "Case", "Ġit", "'s", "Ġ", "2", "0", "2", "4"]
    assert words(load_tokenizer(tmp_path)) == right
    _tidy(tmp_path, ModelConfig(name=str(tmp_path)))
    assert not (tmp_path / "tekken.json").exists()
    assert words(AutoTokenizer.from_pretrained(tmp_path)) == right
