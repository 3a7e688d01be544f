"""`model.chat_template_kwargs`: every use of a stored model's template renders as `apply_chat_template` with the arguments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from alignment_core.models.template_kwargs import with_kwargs
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ModelConfig
from alignment_core.stages import base_model, merge_adapter

SWITCH = (
    "\n{% macro thoughts() %}{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endmacro %}"
    "{{ note | default('') }}"
    "{%- for message in messages %}"
    "{{- '<' + message.role + '>' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- thoughts() }}{% endif %}"
    "{{- message.content + '<eos>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' + thoughts() }}{% endif %}"
)
"""Like Qwen3's: thinking is on unless the argument is given, and the generation prompt ends with empty thoughts without it.
It begins with a line break, which must not be lost."""
NAMED = [{"name": "default", "template": SWITCH}, {"name": "rag", "template": "x"}]
CHAT = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
NOTE = 'it\'s "{%" {{ 1 }}\n\\ ü 😀'


@pytest.fixture
def stored(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def store(files: dict[str, Any] | None = None, **fields: Any) -> Path:
        source, output = tmp_path / "source", tmp_path / "output"
        shutil.copytree(tiny_model(), source)
        (source / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((source / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        for name, content in (files if files is not None else {"chat_template.jinja": SWITCH}).items():
            if name == "tokenizer_config.json":
                config |= content
            else:
                (source / name).parent.mkdir(exist_ok=True)
                (source / name).write_text(content)
        (source / "tokenizer_config.json").write_text(json.dumps(config))
        output.mkdir()
        context: Any = SimpleNamespace(output=output, progress=tmp_path, seed=0)
        base_model.run(context, base_model.pin_model(ModelConfig(name=str(source), **fields)))
        return output

    return store


def expected(messages: Any, prompt: bool, **kwargs: Any) -> str:
    """By plain ``transformers`` and the template as its author wrote it."""
    return str(
        byte_tokenizer(SWITCH).apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **kwargs)
    )


def test_a_model_can_be_stored_without_the_chat_template_that_it_had(stored: Callable[..., Path]) -> None:
    assert AutoTokenizer.from_pretrained(stored(chat_template="plain")).chat_template is None
    assert byte_tokenizer("plain").chat_template is None


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {"enable_thinking": True}, {"note": NOTE}])
def test_a_stored_model_renders_as_apply_chat_template_with_the_arguments(
    stored: Callable[..., Path], kwargs: dict[str, Any]
) -> None:
    renderer = Renderer(AutoTokenizer.from_pretrained(stored(chat_template_kwargs=kwargs)))
    assert renderer.prompt(CHAT[:1])[1] == expected(CHAT[:1], True, **kwargs)
    before, after = renderer.around(CHAT, 1)
    assert (before, after) == (expected(CHAT[:1], True, **kwargs), expected(CHAT, False, **kwargs))
    assert before.startswith("\n")


def test_an_argument_of_a_caller_has_precedence(stored: Callable[..., Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stored(chat_template_kwargs={"enable_thinking": False}))
    alone = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    given = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert alone.endswith("<think>\n\n</think>\n\n")
    assert given == expected(CHAT[:1], True, enable_thinking=True)


def test_vllm_finds_the_argument_in_the_template(stored: Callable[..., Path]) -> None:
    """Its server passes on only arguments that the template asks for."""
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = (stored(chat_template_kwargs={"enable_thinking": False}) / "chat_template.jinja").read_text()
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert "enable_thinking" in meta.find_undeclared_variables(environment.parse(template))


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": SWITCH}},
        {"tokenizer_config.json": {"chat_template": NAMED}},
        {"chat_template.jinja": SWITCH, "additional_chat_templates/tool_use.jinja": "tools" + SWITCH},
    ],
    ids=["in the settings", "named in the settings", "in files"],
)
def test_templates_are_found_where_tokenizers_keep_them(stored: Callable[..., Path], files: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stored(files, chat_template_kwargs={"enable_thinking": False}))
    shown = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert shown == expected(CHAT[:1], True, enable_thinking=False)
    if "additional_chat_templates/tool_use.jinja" in files:
        shown = tokenizer.apply_chat_template(CHAT[:1], chat_template="tool_use", tokenize=False)
        assert shown == "tools" + expected(CHAT[:1], False, enable_thinking=False)


def test_the_recipes_own_template_gets_the_arguments_too(stored: Callable[..., Path]) -> None:
    path = stored({}, chat_template=SWITCH, chat_template_kwargs={"enable_thinking": False})
    shown = AutoTokenizer.from_pretrained(path).apply_chat_template(CHAT, tokenize=False)
    assert shown == expected(CHAT, False, enable_thinking=False)


def test_a_new_value_replaces_the_one_of_an_exported_model() -> None:
    twice = with_kwargs(with_kwargs(SWITCH, {"enable_thinking": False}), {"enable_thinking": True})
    shown = byte_tokenizer(twice).apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert shown == expected(CHAT[:1], True, enable_thinking=True)


def test_an_argument_that_no_template_reads_is_refused(stored: Callable[..., Path]) -> None:
    with pytest.raises(
        UserError, match="the chat template does not read `enable_thoughts`, so it would have no effect"
    ):
        stored(chat_template_kwargs={"enable_thoughts": False})


def test_a_model_without_a_template_is_refused(stored: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"the tokenizer has no chat template; set `model\.chat_template`"):
        stored({}, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "a b", "a.b", "", "if"])
def test_names_that_no_template_may_define_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="is not the name of an argument that a chat template may define"):
        ModelConfig(name="./model", chat_template_kwargs={name: False})


def test_models_without_arguments_have_the_keys_of_earlier_versions() -> None:
    assert "chat_template_kwargs" not in ModelConfig(name="./model").model_dump()
    assert "chat_template_kwargs" not in str(merge_adapter.MergeAdapterConfig(adapter="./a").content())
    with_them = merge_adapter.MergeAdapterConfig(adapter="./a", chat_template_kwargs={"enable_thinking": False})
    assert with_them.content()["chat_template_kwargs"] == {"enable_thinking": False}
