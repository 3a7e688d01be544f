"""Labels from people: pairs in random positions, and every label accounted for."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.artifacts.paths import blob_path
from alignment_core.errors import NotFound, UserError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.nights.inbox import read_inbox
from alignment_core.nights.labels import add_to_inbox, completions_of, exported, id_of, imported, pairs
from alignment_core.recipes import DataSource
from alignment_core.rollout.schemas import SCORES, rollout_schema, score_schema, write_table
from tests.align import align_here

SAID = [("good", 2.0), ("worst", -1.0), ("fair", 1.0), ("good", 2.0)]


def rollouts(prompts: int, texts: Any = SAID) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows = [
        {
            "prompt": prompt,
            "sample": sample,
            "prompt_ids": [1],
            "completion_ids": [2],
            "logps": [-1.0],
            "prompt_text": f"<user>{prompt}",
            "messages": json.dumps(f"question {prompt}"),
            "completion_text": text,
            "finish_reason": "stop",
            "source": f"p:{prompt}",
        }
        for prompt in range(prompts)
        for sample, (text, _) in enumerate(texts)
    ]
    scores = [{"prompt": p, "sample": s, "reward": r} for p in range(prompts) for s, (_, r) in enumerate(texts)]
    return rows, scores


def test_the_best_and_the_worst_are_in_random_places() -> None:
    drawn = pairs(*rollouts(200), seed=1)
    assert {frozenset((row["a"], row["b"])) for row in drawn} == {frozenset(("good", "worst"))}
    assert 70 <= sum(row["a"] == "good" for row in drawn) <= 130  # 100 expected, standard deviation 7
    assert drawn[3]["prompt"] == "question 3", "as it was before the template"
    assert len({row["id"] for row in drawn}) == 200
    assert drawn[0]["id"] == id_of({**drawn[0], "a": drawn[0]["b"], "b": drawn[0]["a"]})
    assert pairs(*rollouts(200), seed=1) == drawn != pairs(*rollouts(200), seed=2)
    few = pairs(*rollouts(200), seed=1, most=5)
    assert [row in drawn for row in few] == [True] * 5


def test_without_scores_two_are_drawn_and_prompts_without_two_are_left_out() -> None:
    sampled = pairs(rollouts(50)[0], None, seed=0)
    drawn = Counter(text for row in sampled for text in (row["a"], row["b"]))
    assert set(drawn) == {"good", "worst", "fair"}
    assert pairs(rollouts(3, [("same", 1.0), ("same", 1.0), (" ", 0.0)])[0], None, seed=0) == []


def test_truncated_completions_are_left_out_as_training_would_end_their_turns() -> None:
    rows, scores = rollouts(3, [("good", 2.0), ("best, but", 3.0), ("worst", -1.0)])
    for row in rows:
        row["finish_reason"] = "length" if row["completion_text"] == "best, but" else "stop"
    for given in (scores, None):
        assert {frozenset((row["a"], row["b"])) for row in pairs(rows, given, seed=0)} == {frozenset(("good", "worst"))}


def test_cut_prompts_are_left_out_as_nights_would_render_them_again() -> None:
    rows, scores = rollouts(3)
    marked = [{**row, "prompt_cut": row["prompt"] == 1} for row in rows]
    for given in (scores, None):
        assert [row["prompt"] for row in pairs(marked, given, seed=0)] == ["question 0", "question 2"]


def labelled(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_of_an_annotator_the_last_answer_counts_and_skips_and_undone_ones_do_not(tmp_path: Path) -> None:
    drawn = [{**row, "preferred": None} for row in pairs(*rollouts(6), seed=0)]

    def answer(number: int, preferred: str, annotator: str = "ada") -> dict[str, Any]:
        return {**drawn[number], "preferred": preferred, "annotator": annotator}

    rows = [
        *(answer(0, "a"), answer(0, "b")),
        *(answer(1, "a"), answer(1, "undo")),
        *(answer(2, "a"), answer(2, "skip")),
        *(answer(3, "both_bad"), answer(3, "tie", "bob")),
        *(answer(4, "a"), answer(4, "b", "bob"), answer(4, "undo", "bob"), answer(4, "undo", "bob")),
        *(answer(5, "a"), answer(5, "b", "bob"), answer(5, "a", "carol")),
    ]
    labels = imported(labelled(tmp_path / "l.jsonl", rows))
    chosen = {row["prompt"]: row["chosen"] for row in labels.rows}
    assert chosen == {"question 0": drawn[0]["b"], "question 4": drawn[4]["a"], "question 5": drawn[5]["a"]}
    counts = {
        "pairs": 6,
        "labelled": 3,
        "changed": 2,
        "undone": 2,
        "unlabelled": 1,
        "skipped": 1,
        "ties": 1,
        "duplicates": 1,
    }
    assert labels.counts == counts


def test_rows_keep_their_pair_annotators_and_time_and_are_added_to_an_inbox_once(tmp_path: Path) -> None:
    drawn = pairs(*rollouts(3), seed=0)
    answers = [
        {**drawn[0], "preferred": "a", "annotator": "bob", "at": "2026-11-25T10:00:00+00:00"},
        {**drawn[0], "preferred": "a", "annotator": "ada", "at": "2026-11-25T11:00:00+00:00"},
        {**drawn[0], "preferred": "b", "annotator": "eve", "at": "2026-11-25T12:00:00+00:00"},
        {**drawn[1], "preferred": "b", "annotator": "ada", "at": "2026-11-25T11:01:00+00:00"},
    ]
    first = imported(labelled(tmp_path / "first.jsonl", answers[:3]))
    kept = {"pair": drawn[0]["id"], "annotators": ["ada", "bob"], "labelled_at": "2026-11-25T11:00:00+00:00"}
    assert [{name: row[name] for name in kept} for row in first.rows] == [kept]
    (tmp_path / "labels-of-an-earlier-version.jsonl").write_text('{"chosen": "x"}\n[1]\n{')
    added = add_to_inbox(first, tmp_path)
    assert added is not None
    assert [json.loads(line) for line in added.read_text().splitlines()] == first.rows
    more = imported(labelled(tmp_path / "more.jsonl", [*answers, {**answers[0], "annotator": "dan"}]))
    added = add_to_inbox(more, tmp_path)
    assert added is not None
    assert [json.loads(line)["pair"] for line in added.read_text().splitlines()] == [drawn[1]["id"]]
    assert add_to_inbox(more, tmp_path) is None
    changed = imported(labelled(tmp_path / "changed.jsonl", [{**answers[3], "preferred": "a"}]))
    assert add_to_inbox(changed, tmp_path) is None
    assert changed.problems == [f"{drawn[1]['id']} is in the inbox with the other answer; left out"]


def test_completions_that_are_words_of_answers_are_completions(tmp_path: Path) -> None:
    rows = []
    for number, word in enumerate(("tie", "both_bad", "skip", "undo")):
        row = {"prompt": f"question {number}", "a": word, "b": "else", "source": "s"}
        rows.append({"id": id_of(row), **row, "preferred": "a", "annotator": "ada"})
    labels = imported(labelled(tmp_path / "l.jsonl", rows))
    assert [row["chosen"] for row in labels.rows] == ["tie", "both_bad", "skip", "undo"]


def test_a_row_with_its_completions_the_other_way_round_means_the_same(tmp_path: Path) -> None:
    drawn = pairs(*rollouts(1), seed=0)
    (tmp_path / "pairs.jsonl").write_text(exported(drawn, "jsonl"))
    swapped = {**drawn[0], "a": drawn[0]["b"], "b": drawn[0]["a"], "preferred": "a", "annotator": "ada"}
    as_it_is = {**drawn[0], "preferred": "b", "annotator": "bob"}
    labels = imported(labelled(tmp_path / "l.jsonl", [swapped, as_it_is]), tmp_path / "pairs.jsonl")
    assert [row["chosen"] for row in labels.rows] == [drawn[0]["b"]]
    assert labels.rows[0]["annotators"] == ["ada", "bob"]


def test_people_who_add_rows_at_once_add_each_once(tmp_path: Path) -> None:
    drawn = pairs(*rollouts(30), seed=0)
    halves = [drawn[:20], drawn[10:]]
    files = [
        labelled(tmp_path / f"{n}.jsonl", [{**row, "preferred": "a"} for row in half]) for n, half in enumerate(halves)
    ]
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_to_inbox(imported(files[number % 2]), inbox), range(16)))
    rows = [json.loads(line) for path in inbox.glob("labels-*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(row["pair"] for row in rows) == sorted(row["id"] for row in drawn)


def test_every_label_is_taken_or_named(tmp_path: Path) -> None:
    drawn = [{**row, "preferred": None} for row in pairs(*rollouts(6), seed=0)]
    rows = [
        {**drawn[0], "preferred": "A "},
        {**drawn[1], "preferred": "b"},
        {**drawn[1], "preferred": "b"},
        {**drawn[2], "preferred": "tie"},
        {**drawn[3], "preferred": "a"},
        {**drawn[3], "preferred": "b"},
        drawn[4],
        {**drawn[5], "preferred": "better"},
        {**drawn[5], "a": "changed", "preferred": "a"},
        {"id": "none"},
        {"preferred": "a"},
        "{",
        {**drawn[5], "a": ["changed"], "preferred": "a"},
    ]
    labels = imported(labelled(tmp_path / "l.jsonl", rows))
    assert labels.rows == [
        {"prompt": "question 0", "chosen": drawn[0]["a"], "rejected": drawn[0]["b"], "pair": drawn[0]["id"]},
        {"prompt": "question 1", "chosen": drawn[1]["b"], "rejected": drawn[1]["a"], "pair": drawn[1]["id"]},
    ]
    assert labels.counts == {
        "pairs": 5,
        "labelled": 2,
        "duplicates": 1,
        "ties": 1,
        "conflicts": 1,
        "unlabelled": 1,
        "malformed": 5,
        "unknown": 1,
    }
    problems = "\n".join(labels.problems)
    for piece in (
        "l.jsonl:8: `preferred` is 'better'; one of a, b, tie, both_bad, skip, undo is needed",
        f"l.jsonl:9: unknown id '{drawn[5]['id']}': it is not that of this pair",
        "l.jsonl:10: there is no `prompt`",
        "l.jsonl:11: there is no `id`",
        "l.jsonl:12: is not JSON",
        "l.jsonl:13: `a` is no text",
        f"l.jsonl:2, l.jsonl:3: {drawn[1]['id']} is labelled several times, alike",
        f"l.jsonl:5, l.jsonl:6: {drawn[3]['id']} has labels that contradict each other; left out",
    ):
        assert piece in problems


def test_ids_alone_are_enough_beside_the_exported_file(tmp_path: Path) -> None:
    drawn = pairs(*rollouts(3), seed=0)
    (tmp_path / "pairs.jsonl").write_text(exported(drawn, "jsonl"))
    rows = [{"id": drawn[0]["id"], "preferred": "b"}, {"id": "0" * 20, "preferred": "a"}]
    rows.append({"id": drawn[1]["id"], "a": "other", "b": "texts", "preferred": "a"})
    labels = imported(labelled(tmp_path / "l.jsonl", rows), tmp_path / "pairs.jsonl")
    assert [row["chosen"] for row in labels.rows] == [drawn[0]["b"]]
    assert labels.counts["unknown"] == 2
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read"):
        imported(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "there is no `id`"),
        ({"preferred": "a"}, "there is no `id`"),
        ({"id": "0", "prompt": "?", "a": "yes"}, "there is no `b`"),
        ({"id": "0", "prompt": "?", "a": "yes", "b": None}, "`b` is no text"),
    ],
)
def test_a_malformed_line_of_the_exported_file_is_named(tmp_path: Path, row: Any, problem: str) -> None:
    drawn = pairs(*rollouts(1), seed=0)
    exported_file = labelled(tmp_path / "pairs.jsonl", [*drawn, row])
    given = labelled(tmp_path / "l.jsonl", [{"id": drawn[0]["id"], "preferred": "b"}])
    with pytest.raises(UserError) as refused:
        imported(given, exported_file)
    assert str(refused.value) == f"pairs.jsonl:2: {problem}; give the exported file with --pairs"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_ends_at_no_other_character_than_a_newline(tmp_path: Path, separator: str) -> None:
    drawn = pairs(*rollouts(1, [(f"two{separator}lines", 1.0), ("worse", 0.0)]), seed=0)
    file = tmp_path / "pairs.jsonl"
    file.write_text(exported([*drawn], "jsonl").replace('"preferred": null', '"preferred": "a"'))
    for known in (None, file):
        labels = imported(file, known)
        assert labels.problems == []
        row = {"prompt": "question 0", "chosen": drawn[0]["a"], "rejected": drawn[0]["b"], "pair": drawn[0]["id"]}
        assert labels.rows == [row]


@pytest.mark.parametrize("part", ["fields", "metadata", "responses"])
def test_a_record_of_argilla_in_another_form_is_named(tmp_path: Path, part: str) -> None:
    records = json.loads(exported(pairs(*rollouts(1), seed=0), "argilla"))
    (tmp_path / "records.json").write_text(json.dumps([{**records[0], part: [{"value": "a"}]}]))
    labels = imported(tmp_path / "records.json")
    assert labels.problems == [f"records.json: record 1: `{part}` is no object"]


def test_records_of_argilla_count_the_majority_of_their_responses(tmp_path: Path) -> None:
    drawn = pairs(*rollouts(3), seed=0)
    records = json.loads(exported(drawn, "argilla"))
    assert records[0]["fields"] == {"prompt": "question 0", "a": drawn[0]["a"], "b": drawn[0]["b"]}
    for record, answers in zip(records, (["a", "a", "b"], ["a", "b"], []), strict=True):
        given = [{"user_id": str(user), "value": value} for user, value in enumerate(answers)]
        record["responses"] = {"preferred": given} if given else {}
    (tmp_path / "records.json").write_text(json.dumps(records))
    labels = imported(tmp_path / "records.json")
    row = {"prompt": "question 0", "chosen": drawn[0]["a"], "rejected": drawn[0]["b"]}
    assert labels.rows == [{**row, "pair": drawn[0]["id"], "annotators": ["0", "1"]}]
    assert {name: labels.counts[name] for name in ("labelled", "conflicts", "unlabelled")} == dict.fromkeys(
        ("labelled", "conflicts", "unlabelled"), 1
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "home" / "store")


@pytest.fixture
def tokenizer() -> Any:
    """With a marker of calls as a special token, as Mistral's has."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    return tokenizer


def published(store: Store, rows: list[dict[str, Any]], tokenizer: Any, folder: Path) -> Reference:
    """Rollouts with these texts as a policy with this tokenizer samples them, whose weights are lost."""
    tokenizer.save_pretrained(folder / "policy")
    (folder / "policy" / "model.safetensors").write_text("weights")
    policy = store.publish(folder / "policy", "model")
    weights = next(entry for entry in store.manifest(policy).files if entry.path == "model.safetensors")
    store.backend.delete(blob_path(weights.sha256))
    for row in rows:
        ids = tokenizer(row["completion_text"] + "<eos>")["input_ids"]
        row |= {"policy": str(policy), "completion_ids": ids}
        row["completion_text"] = tokenizer.decode(ids, skip_special_tokens=True)  # as the stage does
    (folder / "rollouts").mkdir()
    write_table(rows, rollout_schema(), folder / "rollouts" / "shard-00000.parquet")
    return store.publish(folder / "rollouts", "rollouts")


def test_special_tokens_inside_of_completions_are_in_their_text(store: Store, tokenizer: Any, tmp_path: Path) -> None:
    """What is chosen is trained on: without its marker, a call would be an answer in words."""
    call = '[TOOL_CALLS][{"name": "add", "arguments": {}}]'
    rows, _ = rollouts(1, [(call, 1.0), ("I cannot.", 0.0)])
    reference = published(store, rows, tokenizer, tmp_path)
    assert rows[0]["completion_text"] == call.removeprefix("[TOOL_CALLS]")
    assert [row["completion_text"] for row in completions_of(store, reference)] == [call, "I cannot."]


def test_only_the_text_behind_a_chat_template_is_known_of_a_prompt_that_was_cut(
    store: Store, tokenizer: Any, tmp_path: Path
) -> None:
    """Also if all of them were cut. Without a chat template the text is the prompt."""
    rows, _ = rollouts(2)
    for row in rows:
        row["messages"] = row["messages"] if row["prompt"] == 0 else None
    some = completions_of(store, published(store, rows, tokenizer, tmp_path / "some"))
    assert {row["prompt"] for row in some if row["prompt_cut"]} == {1}
    all_cut = [{**row, "messages": None} for row in rows]
    every = completions_of(store, published(store, all_cut, tokenizer, tmp_path / "all"))
    assert {row["prompt"] for row in every if row["prompt_cut"]} == {0, 1}
    tokenizer.chat_template = None
    plain = completions_of(store, published(store, all_cut, tokenizer, tmp_path / "plain"))
    assert not any(row["prompt_cut"] for row in plain)


def test_completions_of_a_policy_that_the_store_lacks_are_refused(store: Store, tokenizer: Any, tmp_path: Path) -> None:
    reference = published(store, rollouts(1)[0], tokenizer, tmp_path)
    elsewhere = open_store(tmp_path / "elsewhere")
    assert elsewhere.publish(store.fetch(reference), "rollouts") == reference
    with pytest.raises(NotFound, match="has no artifact sha256:"):
        completions_of(elsewhere, reference)


def test_from_a_round_through_people_into_an_inbox(store: Store, tokenizer: Any, tmp_path: Path) -> None:
    rows, scores = rollouts(5)
    for row in rows[-len(SAID) :]:
        row["messages"] = None
    write_table(scores, score_schema(), tmp_path / SCORES)
    reference = published(store, rows, tokenizer, tmp_path)
    home, file = tmp_path / "home", tmp_path / "pairs.jsonl"
    done = align_here(home, "labels", "export", str(reference), "-o", str(file), "--json")
    assert json.loads(done.stdout)["pairs"] == 4, done.stderr
    assert json.loads(done.stdout)["prompts_cut"] == 1
    assert align_here(home, "labels", "export", str(reference), "-o", str(file)).returncode == 2, "it may hold labels"

    given = [{**json.loads(line), "preferred": "a"} for line in file.read_text().splitlines()]
    labelled(file, given)
    inbox = tmp_path / "inbox"
    assert align_here(home, "labels", "import", str(file), "--inbox", str(inbox)).returncode == 2, "no such folder"
    inbox.mkdir()
    for new in (True, False):
        done = align_here(home, "labels", "import", str(file), "--inbox", str(inbox), "--json")
        assert json.loads(done.stdout)["new"] == new
    arrived = read_inbox([DataSource(path=str(inbox))], set(), store)
    assert [row.pair["chosen"] for row in arrived.rows] == [row["a"] for row in given]
    assert arrived.malformed == []
    labelled(file, ["nothing", "that", "is a label"])
    assert align_here(home, "labels", "import", str(file), "--inbox", str(inbox)).returncode == 2
