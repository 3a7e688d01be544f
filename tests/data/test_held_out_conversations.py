"""No target of a test row is trained on: rows that share a prompt in any turn go to the same side.

The targets of each row are worked out here from the rows themselves: for every trained answer, the messages before it
and the answer. The splits are then compared by the line numbers in ``source``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.build import BuiltDataset
from alignment_core.data.hold_out import prompts_of
from alignment_core.data.overlap import digest_of_prompt
from alignment_core.errors import DataError

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]


def chat(*turns: str) -> list[dict[str, Any]]:
    """User and assistant by turns."""
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(turns)]


def lines(data: BuiltDataset, table: str) -> set[int]:
    """Line numbers, counted from 0, of the rows of a table."""
    return {int(source.rsplit(":", 1)[1]) - 1 for source in getattr(data, table)["source"].to_pylist()}


def answered(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each prompt within a conversation with the answer to it."""
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            before = [(message["role"], message["content"]) for message in messages[:turn]]
            yield json.dumps(before), message["content"]


def conversations(count: int, seed: int) -> list[list[dict[str, Any]]]:
    """Conversations of one to four answers; each shares some first turns with one of ten others and then differs."""
    draw = random.Random(seed)
    rows_of_chat = []
    for number in range(count):
        start, shared, answers = draw.randrange(count // 3), draw.randint(0, 3), draw.randint(1, 4)
        turns = [f"{kind}{start if turn < shared else f'{number}.'}-{turn}" for turn in range(answers) for kind in "ua"]
        rows_of_chat.append(chat(*turns))
    return rows_of_chat


@pytest.mark.parametrize("seed", range(3))
def test_no_target_of_a_held_out_conversation_is_trained_on(built: Build, jsonl: Write, seed: int) -> None:
    rows = conversations(60, seed)
    data = built(jsonl({"messages": row} for row in rows), "demonstrations", test_rows=10)
    train, test = lines(data, "train"), lines(data, "test")
    assert not train & test
    assert 5 <= len(test) <= 15
    trained = {target for number in train for target in answered(rows[number])}
    assert not [target for number in test for target in answered(rows[number]) if target in trained]


def test_a_conversation_in_several_rows_stays_together(built: Build, jsonl: Write) -> None:
    """Each answer of a conversation as a separate row: an earlier answer is in the prompt of a later row."""
    rows = [
        {"prompt": chat(f"u{i}", f"a{i}", f"v{i}", f"b{i}", f"w{i}")[:end], "completion": f"answer {end}"}
        for i in range(12)
        for end in (1, 3, 5)
    ]
    data = built(jsonl(rows), "demonstrations", test_rows=6)
    test = lines(data, "test")
    assert len(test) == 6
    assert {number // 3 for number in test} & {number // 3 for number in lines(data, "train")} == set()


@pytest.mark.parametrize("kind", ["preferences", "unpaired"])
def test_pairs_at_several_depths_of_a_dialogue_stay_together(built: Build, jsonl: Write, kind: str) -> None:
    """As in hh-rlhf: the answer chosen first is in the prompt of the next pair."""
    pairs = [
        {"prompt": chat(f"u{i}", f"good{i}", f"v{i}")[:end], "chosen": f"good{i}", "rejected": f"bad{i}.{end}"}
        for i in range(10)
        for end in (1, 3)
    ]
    data = built(jsonl(pairs), kind, test_rows=4 if kind == "preferences" else 8)
    test = lines(data, "test")
    assert len(test) == 4
    assert {number // 2 for number in test} & {number // 2 for number in lines(data, "train")} == set()


def test_examples_in_few_shot_prompts_join_nothing(built: Build, jsonl: Write) -> None:
    """All prompts begin with the same two answered examples, to which no row trains an answer."""
    shots = chat("2+2?", "4", "3+3?", "6")
    rows = [{"prompt": [*shots, *chat(f"{i}+1?")], "completion": str(i + 1)} for i in range(20)]
    data = built(jsonl(rows), "demonstrations", test_rows=5)
    assert len(lines(data, "test")) == 5


def test_fields_that_no_model_reads_do_not_tell_prompts_apart(built: Build, jsonl: Write) -> None:
    """The same question with another id of the message, and the same call with another id of the call."""

    def called(number: int, call: str) -> dict[str, Any]:
        calls = [{"id": call, "type": "function", "function": {"name": "look", "arguments": {"at": number}}}]
        return {
            "messages": [
                {"role": "user", "content": f"u{number}", "id": f"message-{call}"},
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "content": "seen", "tool_call_id": call},
                {"role": "assistant", "content": f"done {call}"},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
        }

    shows = "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
    shows += "{{ '[assistant]' if add_generation_prompt }}"
    rows = [called(number, f"{number}{copy}") for number in range(10) for copy in "xy"]
    data = built(jsonl(rows), "demonstrations", test_rows=4, chat_template=shows)
    test = {number // 2 for number in lines(data, "test")}
    assert len(test) == 2
    assert not test & {number // 2 for number in lines(data, "train")}


def test_answers_that_are_read_and_not_trained_are_context() -> None:
    """Of four answers one is in the prompt and one is not trained; the prompts of both are no targets of the row."""
    turns = chat("q0", "a0", "q1", "a1", "q2", "a2", "q3", "a3")
    before = [digest_of_prompt(turns[:place]) for place in (1, 3, 5, 7)]

    @dataclass
    class LeavesOneOut:
        prompt: list[Any]
        completion: list[Any]

        def prompts(self) -> tuple[str, ...]:
            return (before[1], before[3])

        def rows(self, limits: Any) -> list[Any]:
            return []

    example = LeavesOneOut(turns[:3], turns[3:])
    assert prompts_of(example, last_turn=False) == ((before[1], before[3]), (before[0], before[2]))
    assert prompts_of(example, last_turn=True) == ((before[3],), tuple(before[:3]))


def test_answers_of_a_held_out_source_are_in_no_training_conversation(built: Build, jsonl: Write) -> None:
    test = jsonl([{"messages": chat("hi", "hello", "q3", "a3")}], name="test.jsonl")
    train = jsonl(
        [
            {"prompt": chat("hi"), "completion": "hey"},  # a prompt of the test row
            {"prompt": chat("hi", "hello", "q9"), "completion": "a9"},  # the answer is in the prompt
            {"prompt": chat("hallo", "hello", "q3"), "completion": "a3"},
        ]
    )
    data = built({"sources": [str(train), {"path": str(test), "held_out": True}]}, "demonstrations")
    assert lines(data, "train") == {2}
    assert data.statistics["dropped"] == {"prompt_of_test": 2}


def test_only_the_last_prompt_counts_where_only_the_last_answer_is_trained(built: Build, jsonl: Write) -> None:
    rows = [{"messages": chat("hi", "yes?", f"q{i}", end)} for i in range(10) for end in ("a", "b")]
    path = jsonl(rows)
    data = built(path, "demonstrations", test_rows=6, assistant_turns="last")
    assert len(lines(data, "test")) == 6
    assert not {number // 2 for number in lines(data, "test")} & {number // 2 for number in lines(data, "train")}
    with pytest.raises(DataError) as refusal:
        built(path, "demonstrations", test_rows=6)
    assert str(refusal.value) == (
        "test_rows: cannot hold out 6 of 20 usable rows: rows that share a prompt go to the same split, and all 20 rows are "
        "in one group. Conversations that begin alike share the prompts of their first turns; with `assistant_turns: last` "
        "only the last turn of each is trained, and only its prompt counts"
    )


def test_a_test_set_much_smaller_than_requested_is_reported(built: Build, jsonl: Write) -> None:
    from alignment_core.data.statistics import losses

    rows = [{"prompt": "hello", "completion": str(i)} for i in range(500)]
    rows += [{"prompt": f"p{i}", "completion": "a"} for i in range(3)]
    data = built(jsonl(rows), "demonstrations", test_rows=100)
    assert losses(data.statistics, "first_exhausted", test_rows=100) == [
        "test_rows: 3 rows are held out, not 100: rows that share a prompt go to the same split, and the other groups of such "
        "rows are too large"
    ]
    assert losses(data.statistics, "first_exhausted", test_rows=3) == []
