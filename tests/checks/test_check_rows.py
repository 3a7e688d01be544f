"""A recipe's rows are read, and its data set is named, before anything heavy is started or imported."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from alignment_core.checks.rows import Question, answers_to, ask
from alignment_core.data import kinds
from alignment_core.data.context import check_context, longest_sampled, longest_trained
from alignment_core.data.tables import compact
from alignment_core.errors import DataError
from tests.checks.recipes import MODEL, look, questions, sft


def test_a_malformed_row_is_named_with_its_data_set_before_any_tokenizer_is_loaded(store, rows):
    rows.write_text(rows.read_text() + "{broken\n")
    (problem,) = look(store, sft(rows)).problems
    assert problem.startswith("sft/data: 1 of 101 rows is malformed")
    assert "rows.jsonl:101: is not valid JSON" in problem


def test_rows_that_the_chat_template_refuses_and_rows_that_are_too_long_are_found_by_the_tokenizer(store, rows):
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "!" * 100, "completion": "yes"}) + "\n")
    (problem,) = look(store, sft(rows)).problems
    assert "sft/data: rows.jsonl:101: the row has 106 tokens, but the model takes at most 64" in problem
    assert "set max_length to 64 or less" in problem
    (fine,) = look(store, sft(rows, max_length=64)).seen
    assert (fine.problem, fine.dropped) == (None, {"too_long": 1})
    file = rows.with_name("chats.jsonl")
    file.write_text(json.dumps({"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    (problem,) = look(store, sft(file)).problems
    assert "chats.jsonl:1: the chat template refuses this conversation" in problem


@pytest.mark.parametrize(("row", "events"), [("", ["parsed", True]), ("{broken\n", [False])])
def test_rows_are_reported_as_parsed_before_they_are_rendered_unless_one_is_malformed(rows, row, events):
    with rows.open("a") as file:
        file.write(row)
    seen: list[Any] = []
    of_rows = [Question.model_validate(question) for question in questions(sft(rows))]
    with closing(ask(of_rows, lambda: seen.append("parsed"))) as answers:
        for answer in answers:
            seen.append(answer.problem is None)
    assert seen == events


def test_without_rows_nothing_is_waited_for():
    seen: list[str] = []
    assert list(ask([], lambda: seen.append("parsed"))) == []
    assert seen == ["parsed"]


def test_an_allowed_share_of_malformed_rows_passes_the_check(store, rows):
    rows.write_text("{broken\n" + rows.read_text())
    assert look(store, sft(rows, max_bad_rows=0.1)).problems == []


def test_sources_without_a_valid_row_are_refused_only_if_read_to_the_end(store, rows, monkeypatch):
    monkeypatch.setattr("alignment_core.checks.rows.RENDERED", 3)
    monkeypatch.setattr("alignment_core.checks.rows.ask", answers_to)
    long = json.dumps({"prompt": "!" * 100, "completion": "yes"}) + "\n"
    rows.write_text(long * 2)
    (problem,) = look(store, sft(rows, max_length=64)).problems
    assert problem == ("sft/data: no rows left of 2 rows read from rows.jsonl: 2 are longer than max_length (too_long)")
    rows.write_text(long * 3 + json.dumps({"prompt": "?", "completion": "yes"}) + "\n")  # the longest first
    (answer,) = look(store, sft(rows, max_length=64)).seen
    assert (answer.problem, answer.read, answer.dropped) == (None, 3, {"too_long": 3})
    assert answer.unseen == "the filters drop all of the first 3 rows; later rows were not read"


@pytest.mark.parametrize(
    ("mixing", "refused"), [({}, True), ({"mixing": "first_exhausted"}, False), ({"mixing": "all_exhausted"}, True)]
)
def test_rows_that_a_mixture_may_not_draw_are_not_refused(store, rows, mixing, refused):
    short = rows.with_name("short.jsonl")
    short.write_text(json.dumps({"prompt": "?", "completion": "yes"}) + "\n")
    rows.write_text(rows.read_text() + json.dumps({"prompt": "!" * 100, "completion": "yes"}) + "\n")
    weight = {"weight": 1} if mixing else {}
    sources = [{"path": str(file), **weight} for file in (short, rows)]
    recipe = {"method": "sft", "name": "demo", "model": MODEL, "sft": {"data": {"sources": sources, **mixing}}}
    assert ["takes at most 64" in problem for problem in look(store, recipe).problems] == [True] * refused


@pytest.mark.parametrize(
    ("name", "columns", "tokens"),
    [
        ("demonstrations", {"input_ids": [1] * 9, "loss_mask": [1] * 9, "text": ""}, 9),
        (
            "preferences",
            {
                "prompt_ids": [1] * 4,
                "chosen_ids": [1] * 2,
                "rejected_ids": [1] * 5,
                **dict.fromkeys(("prompt", "chosen", "rejected"), ""),
                "margin": None,
            },
            9,  # the prompt with the longer answer
        ),
        (
            "prompts",
            {"prompt_ids": [1] * 8, **dict.fromkeys(("prompt", "label", "task", "messages", "tools", "columns"))},
            9,
        ),  # and one token of an answer
    ],
)
def test_a_row_as_long_as_the_context_passes_and_a_longer_row_is_refused(name, columns, tokens):
    kind = kinds.load(name)
    rows = [kind.sequences(compact({**columns, "source": "rows.jsonl:7"}, kind.columns))]
    check_context(rows, tokens, ["rows.jsonl:7"].__getitem__)
    with pytest.raises(DataError, match=r"^rows\.jsonl:7: the row has 9 tokens, but the model takes at most 8 "):
        check_context(rows, tokens - 1, ["rows.jsonl:7"].__getitem__)


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("shape", "trained", "sampled"),
    [
        ({}, 32768, 32768),
        ({"rope_scaling": {"type": "yarn", **YARN}}, 131072, 32768),  # vLLM takes it as scaled already
        ({"rope_parameters": {"rope_type": "yarn", **YARN}}, 131072, 32768),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 131072, 32768),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}, "other": None}}, 131072, 32768),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 65536, 65536),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4096}},
            32768,
            32768,
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 65536, 32768),  # the end of vLLM's table
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 32768, 32768),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, None, 65536),
    ],
)
def test_scaled_positions_take_longer_rows(shape, trained, sampled):
    shape = {"max_position_embeddings": 32768, **shape}
    assert (longest_trained(shape), longest_sampled(shape)) == (trained, sampled)


@pytest.mark.parametrize("family", ["gpt2", "gptj", "codegen", "gpt_bigcode", "dbrx", "qwen3_vl", "gemma3"])
def test_the_context_is_that_of_the_models_configuration_whatever_its_name_and_place(family):
    import transformers

    config = transformers.AutoConfig.for_model(family)
    shape = config.to_dict()
    assert "max_position_embeddings" not in shape
    context = config.get_text_config().max_position_embeddings
    assert (longest_trained(shape), longest_sampled(shape)) == (context, context)


def test_scaled_positions_of_a_part_for_text_are_those_of_a_model_for_text():
    text = {"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    assert (longest_trained({"text_config": text}), longest_sampled({"text_config": text})) == (2048, 2048)
    gemma = {"model_type": "gemma3", "text_config": {**text, "model_type": "gemma3_text"}}
    assert longest_sampled(gemma) == 1024  # which vLLM takes as scaled already
    assert longest_trained({"text_config": None}) is longest_sampled({"text_config": None}) is None


def test_rows_are_rendered_with_the_arguments_of_the_chat_template(store, rows):
    """A template that shows the argument in each prompt makes the prompts longer by its text."""
    template = "{{ note | default('') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    recipe = sft(rows)
    model = {**recipe["model"], "chat_template": template}
    lengths = []
    for kwargs in ({}, {"note": "!" * 20}):
        (answer,) = look(store, {**recipe, "model": {**model, "chat_template_kwargs": kwargs}}).seen
        assert answer.problem is None
        lengths.append([before for before, _ in answer.sequences])
    assert lengths[1] == [length + 20 for length in lengths[0]]
    (problem,) = look(store, {**recipe, "model": {**model, "chat_template_kwargs": {"nota": 1}}}).problems
    assert "model.chat_template_kwargs: the chat template does not read `nota`" in problem


def test_a_recipes_end_of_sequence_is_looked_up_in_the_vocabulary(store, rows):
    recipe = sft(rows)
    (answer,) = look(store, {**recipe, "model": {**recipe["model"], "eos_token": "<unused0>"}}).seen
    assert answer.problem is None
    (problem,) = look(store, {**recipe, "model": {**recipe["model"], "eos_token": "<|end|>"}}).problems
    assert "model.eos_token: the tokenizer's vocabulary has no token '<|end|>'" in problem
