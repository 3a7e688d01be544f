"""Prompts of an evaluation in the chat template of each policy: the same rows, in the same order and number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.data.own_template import has_truncated_rows, in_own_template
from alignment_core.data.pin import pin
from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from alignment_core.execution.base import StageCall
from alignment_core.models.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from alignment_core.recipes import DataConfig
from alignment_core.stages.dataset import DatasetConfig
from tests.stages.calls import run_alone

LONGER = "<system>You answer questions.{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
WITH_TOOLS = CHAT_TEMPLATE.replace("{%- for", "{{ tools and tools[0].function.name }}{%- for", 1)
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "label": "2"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}], "label": "4"},
    {"prompt": "x" * 20, "label": "y"},
]
MESSAGES = [
    {"messages": row.get("messages", [{"role": "user", "content": row.get("prompt")}]), "label": row["label"]}
    for row in ROWS
]
TEXTS = [row for row in ROWS if "prompt" in row]
TRUNCATED = {"max_prompt_length": 12, "overlong": "truncate"}


class Prompts:
    """Data sets of prompts, and their rows as a policy with another chat template gets them."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder

    def dataset(self, rows: list[dict[str, Any]], template: str | None, **data: Any) -> Path:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = DataConfig.model_validate({"sources": [{"path": str(path)}], "shuffle": False, **data})
        config = DatasetConfig(data=section, sources=tuple(map(pin, section.sources)), kind="prompts")
        model = {"tokenizer": self._model(template)}
        call = StageCall(stage="dataset", label="data", config=config.model_dump(mode="json"), inputs=model, seed=3)
        return self.store.fetch(run_alone(self.store, call).reference)

    def _model(self, template: str | None) -> Reference:
        folder = self.folder / f"model-{digest_of(template)[:8]}"
        byte_tokenizer(template).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"vocab_size": 264}))
        return self.store.publish(folder, "model")

    def rows(self, prompts: Path) -> list[dict[str, Any]]:
        return pq.read_table(prompts / "train.parquet").to_pylist()

    def rendered(self, prompts: Path, template: str | None) -> tuple[list[dict[str, Any]], list[str]]:
        return in_own_template(
            self.rows(prompts), Renderer(byte_tokenizer(template)), has_truncated_rows(prompts), "the policy"
        )


@pytest.fixture
def prompts(store: Store, tmp_path: Path) -> Prompts:
    return Prompts(store, tmp_path)


@pytest.mark.parametrize("rows", [MESSAGES, TEXTS], ids=["messages", "texts"])
@pytest.mark.parametrize("template", [None, LONGER])
def test_prompts_are_those_that_a_data_set_in_the_other_template_has(
    rows: list[dict[str, Any]], template: str | None, prompts: Prompts
) -> None:
    """In both directions; and in the same template they stay."""
    other = LONGER if template is None else None
    first, second = prompts.dataset(rows, template), prompts.dataset(rows, other)
    assert prompts.rows(first) != prompts.rows(second)
    assert prompts.rendered(first, other) == (prompts.rows(second), [])
    assert prompts.rendered(second, template) == (prompts.rows(first), [])
    assert prompts.rendered(first, template) == (prompts.rows(first), [])


def test_the_text_is_that_of_the_policys_template(prompts: Prompts) -> None:
    rendered, _ = prompts.rendered(prompts.dataset(MESSAGES, None), LONGER)
    assert rendered[1]["prompt"] == "<system>You answer questions.<system>Be brief.<user>2+2=<assistant>"


def test_prompts_in_plain_text_are_messages_of_the_user_in_a_template_and_back(prompts: Prompts) -> None:
    plain, chat = prompts.dataset(TEXTS, "plain"), prompts.dataset(TEXTS, None)
    rendered, warnings = prompts.rendered(plain, None)
    assert [row["prompt"] for row in rendered] == ["<user>1+1=<assistant>", f"<user>{'x' * 20}<assistant>"]
    assert (rendered, warnings) == (prompts.rows(chat), [])
    rendered, (warning,) = prompts.rendered(chat, "plain")
    assert rendered == prompts.rows(plain)
    assert "the policy has no chat template and gets plain text, unlike the recipe's `model`" in warning


@pytest.mark.parametrize(
    "rows", [MESSAGES, [{"prompt": "1+1=", "label": "2", "tools": TOOLS}]], ids=["messages", "tools"]
)
def test_a_model_without_a_chat_template_gets_conversations_in_the_template_that_they_have(
    rows: list[dict[str, Any]], prompts: Prompts
) -> None:
    """As a base model beside its chat model; it could not render any of them."""
    data = prompts.dataset(rows, WITH_TOOLS)
    rendered, (warning,) = prompts.rendered(data, "plain")
    assert rendered == prompts.rows(data)
    assert "the policy has no chat template, and prompts are conversations" in warning


def test_all_prompts_stay_if_they_become_longer_than_the_data_allows(prompts: Prompts) -> None:
    """Policies are compared by the prompts' numbers. 20 letters are 22 tokens in the first template; the second writes 21
    letters behind one more special token."""
    data = prompts.dataset(TEXTS, None, max_prompt_length=30, max_length=40)
    rendered, _ = prompts.rendered(data, LONGER)
    assert [row["label"] for row in rendered] == ["2", "y"]
    assert max(len(row["prompt_ids"]) for row in rendered) == 44


def test_tools_are_shown_as_the_other_template_shows_them(prompts: Prompts) -> None:
    second = WITH_TOOLS.replace("{{ tools", "functions: {{ tools")
    rows = [{"prompt": "1+1=", "label": "2", "tools": TOOLS}]
    rendered, _ = prompts.rendered(prompts.dataset(rows, WITH_TOOLS), second)
    assert rendered[0]["prompt"] == "functions: add<user>1+1=<assistant>"
    assert rendered == prompts.rows(prompts.dataset(rows, second))


def test_a_template_that_asks_for_todays_date_is_named(prompts: Prompts) -> None:
    dated = "{{ strftime_now('%Y') }}" + LONGER
    rendered, warnings = prompts.rendered(prompts.dataset(TEXTS, LONGER), dated)
    assert rendered == prompts.rows(prompts.dataset(TEXTS, dated))
    assert warnings == ["the chat template of the policy asks for today's date: it gets 2024-07-26, on any day"]
    assert prompts.rendered(prompts.dataset(TEXTS, dated), dated)[1] == [], "the data set has said so"


@pytest.mark.parametrize(
    ("template", "other", "are_named"),
    [
        (None, None, False),
        (None, LONGER, False),
        (None, CHAT_TEMPLATE.replace("<assistant>", "<system>"), True),
        (None, "plain", False),
        ("plain", "plain", False),
        ("plain", None, True),
    ],
)
def test_truncated_prompts_stay_and_are_named_if_the_policys_own_would_end_otherwise(
    template: str | None, other: str | None, are_named: bool, prompts: Prompts
) -> None:
    """The rest of a truncated prompt is the end of a rendered conversation, not a message. What LONGER writes before a message
    would be cut off, too; a policy without a template ends no prompt in a way of its own."""
    data = prompts.dataset([TEXTS[1]], template, **TRUNCATED)
    (row,) = prompts.rows(data)
    assert len(row["prompt_ids"]) == 12
    rendered, warnings = prompts.rendered(data, other)
    assert rendered == [row]
    assert [warning.partition(":")[0] for warning in warnings] == ["evaluation.prompts.overlong"] * are_named


@pytest.mark.parametrize(
    ("other", "text"), [(LONGER, "<system>You answer questions.<user>1+1=<assistant>"), ("plain", "1+1=")]
)
def test_whole_prompts_beside_truncated_ones_are_rendered(other: str, text: str, prompts: Prompts) -> None:
    """And the policy gets two forms of prompts, which is said."""
    data = prompts.dataset(TEXTS, None, **TRUNCATED)
    rendered, warnings = prompts.rendered(data, other)
    assert rendered[0]["prompt"] == text
    assert rendered[1] == prompts.rows(data)[1]
    assert "evaluation.prompts.overlong: truncated prompts stay" in warnings[-1]


def test_words_that_the_other_template_leaves_out_are_named(prompts: Prompts) -> None:
    """As data sets name them: this policy gets other questions than the recipe's model."""
    of_user = LONGER.replace("messages %}", "messages if m.role == 'user' %}")
    rendered, (warning,) = prompts.rendered(prompts.dataset(MESSAGES, None), of_user)
    assert rendered[1]["prompt"] == "<system>You answer questions.<user>2+2=<assistant>"
    assert warning.startswith("the policy: 1 system messages")
    assert "the chat template does not show" in warning


def test_prompts_of_a_stage_of_a_plug_in_need_no_statistics_and_no_messages(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1], "prompt": "1+1="}]
    rendered, _ = in_own_template(rows, Renderer(byte_tokenizer(None)), has_truncated_rows(tmp_path), "the policy")
    assert rendered[0]["prompt"] == "<user>1+1=<assistant>"


def test_a_prompt_that_the_other_template_refuses_is_named_with_a_cure(prompts: Prompts) -> None:
    template = "{{ raise_exception('no system message') if messages[0].role == 'system' }}" + LONGER
    data = prompts.dataset(MESSAGES, None)
    with pytest.raises(UserError, match=r"rows\.jsonl:2: .*no system message; set evaluation\.prompts\.chat_template"):
        prompts.rendered(data, template)
