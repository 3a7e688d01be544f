"""The column `tools` of every kind of rows: the prompt is the one of ``apply_chat_template(messages, tools=…)``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data import kinds
from alignment_core.data.build import BuiltDataset
from alignment_core.data.completion_text import CompletionText
from alignment_core.data.messages import assistant
from alignment_core.environments.episode import Episode
from alignment_core.errors import UserError
from alignment_core.nights import labels
from alignment_core.rewards import llm_judge
from alignment_core.rewards.group_function import _seen
from alignment_core.rollout.rollout import Rollout
from alignment_core.rollout.schemas import rollout_schema, shard_rows
from tests.data.test_tools_in_rows import CHAT, TEMPLATE, TOOLS

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]

PROMPT, ANSWER = CHAT[:1], assistant("nine")
STEPS = {"completions": ["3*3", "9"], "labels": [True, True]}
PAIR = {"chosen": ANSWER, "rejected": assistant("ten")}
HH = {"chosen": "\n\nHuman: 3 squared?\n\nAssistant: nine", "rejected": "\n\nHuman: 3 squared?\n\nAssistant: ten"}
SHEPHERD = {"input": "3 squared?\nStep 1: 9 ки", "label": "3 squared?\nStep 1: 9 +"}
ROWS: dict[tuple[str, str], dict[str, Any]] = {
    ("prompts", "prompts"): {"prompt": PROMPT},
    ("prompts", "messages"): {"messages": [*PROMPT, *ANSWER]},
    ("prompts", "prompt_completion"): {"prompt": PROMPT, "completion": ANSWER},
    ("prompts", "preference"): {"prompt": PROMPT, **PAIR},
    ("prompts", "hh"): HH,
    ("unpaired", "unpaired"): {"prompt": PROMPT, "completion": ANSWER, "label": True},
    ("unpaired", "preference"): {"prompt": PROMPT, **PAIR},
    ("unpaired", "hh"): HH,
    ("stepwise", "stepwise"): {"prompt": PROMPT, **STEPS},
    ("preferences", "preference"): {"prompt": PROMPT, **PAIR},
    ("preferences", "hh"): HH,
    ("demonstrations", "messages"): {"messages": [*PROMPT, *ANSWER]},
    ("demonstrations", "prompt_completion"): {"prompt": PROMPT, "completion": ANSWER},
    ("demonstrations", "preference"): {"prompt": PROMPT, **PAIR},
    ("demonstrations", "hh"): HH,
}


@pytest.mark.parametrize(("kind", "format"), ROWS)
def test_tools_in_the_prompt_are_rendered_as_by_transformers(
    built: Build, jsonl: Write, tokenizer: Any, kind: str, format: str
) -> None:
    path = jsonl([{**ROWS[kind, format], "tools": TOOLS}])
    data = built({"path": str(path), "format": format}, kind, chat_template=TEMPLATE)
    right = tokenizer.apply_chat_template(
        PROMPT, tools=TOOLS, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    assert right == "<tools>square,<user>3 squared?<assistant>"
    row = data.train.to_pylist()[0]
    ids = row.get("prompt_ids") or row["input_ids"]
    assert tokenizer.decode(ids).startswith(right)


def test_steps_of_math_shepherd_have_the_tools_too(built: Build, jsonl: Write) -> None:
    data = built(jsonl([{**SHEPHERD, "tools": TOOLS}]), "stepwise", chat_template=TEMPLATE)
    assert data.train["prompt"][0].as_py().startswith("<tools>square,")


def test_every_format_of_messages_reads_tools() -> None:
    """Plain text is used unchanged; all other formats of all kinds render a prompt, which may offer tools."""
    formats = [(kind, name, form) for kind in kinds.KINDS.names() for name, form in kinds.load(kind).formats.items()]
    assert [(kind, name) for kind, name, form in formats if name != "text" and "tools" not in form.takes] == []


def test_a_pair_read_as_a_prompt_keeps_the_label_that_other_prompts_keep(built: Build, jsonl: Write) -> None:
    conversations = {"chosen": [*PROMPT, *ANSWER], "rejected": [*PROMPT, *assistant("ten")]}
    assert built(jsonl([{**conversations, "label": "9"}]), "prompts").train["label"].to_pylist() == ["9"]


def test_tools_that_a_template_does_not_show_are_refused(built: Build, jsonl: Write, plain_tokenizer: Any) -> None:
    for row, kind in (({"prompt": PROMPT}, "prompts"), (ROWS["unpaired", "unpaired"], "unpaired")):
        with pytest.raises(UserError, match="`tools`, which the chat template does not show"):
            built(jsonl([{**row, "tools": TOOLS}]), kind)
    with pytest.raises(UserError, match="neither the tokenizer nor the data set has a chat template"):
        built(jsonl([{"prompt": "a", "tools": TOOLS}]), "prompts", tokenizer=plain_tokenizer)


def test_prompts_and_completions_keep_the_tools_for_a_second_rendering(
    built: Build, jsonl: Write, tokenizer: Any
) -> None:
    rows = [{"prompt": PROMPT, "tools": TOOLS}, {"prompt": "a"}]
    data = built({"path": str(jsonl(rows)), "shuffle": False}, "prompts", chat_template=TEMPLATE)
    first, second = data.train.to_pylist()
    assert (json.loads(first["tools"]), second["tools"]) == (TOOLS, None)
    episode = Episode(0, 0, 0, first, most_tokens=4)
    rollout = Rollout.of(episode, CompletionText(tokenizer), "policy")
    assert json.loads(rollout.row()["tools"]) == TOOLS
    assert "tools" in rollout_schema().names

    class Completion:
        token_ids = logps = rollout.completion_ids
        finish_reason = "stop"
        texts = None

    (shard,) = shard_rows([first], 0, [Completion()], CompletionText(tokenizer), "policy")  # type: ignore[list-item]
    assert json.loads(shard["tools"]) == TOOLS
    assert _seen(shard)["tools"] == TOOLS, "the argument of a reward function"
    assert '"square"' in llm_judge.conversation(shard)


def test_a_prompt_that_was_cut_has_neither_messages_nor_tools(built: Build, jsonl: Write) -> None:
    row = {"prompt": [{"role": "user", "content": "a" * 50}], "tools": TOOLS}
    source = {"path": str(jsonl([row])), "max_prompt_length": 20, "overlong": "truncate"}
    cut = built(source, "prompts", chat_template=TEMPLATE).train.to_pylist()[0]
    assert (cut["messages"], cut["tools"]) == (None, None)


def test_labels_of_people_keep_the_tools(tmp_path: Path) -> None:
    given = {"prompt": 0, "messages": json.dumps(PROMPT), "tools": json.dumps(TOOLS), "source": "s"}
    given |= {"prompt_text": "?", "finish_reason": "stop"}
    rollouts = [{**given, "completion_text": text} for text in ("nine", "ten")]
    for format in ("jsonl", "argilla"):
        file = tmp_path / format
        text = labels.exported(labels.pairs(rollouts, None, 0), format)  # type: ignore[arg-type]
        if format == "jsonl":
            file.write_text(text.replace('"preferred": null', '"preferred": "a"'))
        else:
            (record,) = json.loads(text)
            record["responses"] = {"preferred": [{"value": "a"}]}
            file.write_text(json.dumps([record]))
        (row,) = labels.imported(file).rows
        assert (row["prompt"], row["tools"]) == (PROMPT, TOOLS)
