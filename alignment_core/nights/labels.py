"""Pairs for people to label, and their labels as preference rows: plain JSON Lines, or records as Argilla has them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.workspace import open_lock
from alignment_core.canonical import derive_seed, digest_of
from alignment_core.data.messages import as_given, in_words, text_of, tools_of
from alignment_core.errors import DataError, EnvironmentFault, UserError
from alignment_core.files import write_whole
from alignment_core.nights.agreement import krippendorff_alpha

Format = Literal["jsonl", "argilla"]
QUESTION = "preferred"
"""The field that annotators fill in, and Argilla's question of this name."""
ANSWERS = ("a", "b", "tie", "both_bad", "skip", "undo")
"""``both_bad`` is no preference, as a tie is; ``skip`` is no answer; ``undo`` takes the annotator's one about the pair back."""
NO_PREFERENCE = ("tie", "both_bad")
LOCK = ".labels.lock"
"""File in an inbox, locked while rows are added."""
DIGITS = 20
"""Of an id."""

Row = dict[str, Any]


def completions_of(store: Store, rollouts: Reference, trust_remote_code: bool = False) -> list[Row]:
    """Completions whose text keeps special tokens, such as the marker of a call: preference rows are made of it. Of a prompt
    that was cut (``prompt_cut``) only the text behind the chat template is known, which nights would put into it once more.

    Raises NotFound if the policy that sampled them is not in the store; of it the tokenizer alone is read.
    """
    from alignment_core.data.completion_text import CompletionText, with_special_tokens
    from alignment_core.data.template import Renderer
    from alignment_core.data.turn_end import chat_template_of, eos_token_ids
    from alignment_core.models.model_ref import Model
    from alignment_core.models.saving import GENERATION_CONFIG, TOKENIZER_FILES
    from alignment_core.rollout.schemas import read_rollouts

    patterns = (*TOKENIZER_FILES, "config.json", GENERATION_CONFIG, *(("*.py",) if trust_remote_code else ()))
    with ExitStack() as uses, store.workspace.scratch() as scratch:
        folder = store.fetch(rollouts, uses)
        rows = read_rollouts(folder)
        policy = Reference.parse(rows[0]["policy"])
        for entry in store.manifest(policy).files:
            if any(fnmatchcase(entry.path, pattern) for pattern in patterns):
                (scratch / entry.path).parent.mkdir(parents=True, exist_ok=True)
                store.blobs.get(policy.short, entry, scratch / entry.path)
        tokenizer = Model(scratch, policy, trust_remote_code).tokenizer()
        renderer = Renderer(tokenizer, chat_template_of(folder), eos_token_ids(scratch))
        completions = with_special_tokens(rows, CompletionText(tokenizer, renderer.turn_end, skip_special_tokens=False))
        return [{**row, "prompt_cut": not (renderer.is_plain or row.get("messages"))} for row in completions]


def pairs(rollouts: Sequence[Row], scores: Sequence[Row] | None, seed: int, most: int | None = None) -> list[Row]:
    """A pair of different completions for each prompt that has two: the best and the worst by their ``reward``, or two that
    are drawn. Which of them is ``a`` is drawn, too. With ``most``, so many pairs of prompts that are drawn.

    Truncated completions are left out: a preference row has texts alone, and training would end the turn behind them. So are
    prompts that were cut.
    """
    rewards = [row.get("reward") for row in scores] if scores else [None] * len(rollouts)
    chosen_pairs = []
    for prompt, group in groupby(zip(rollouts, rewards, strict=True), key=lambda both: int(both[0]["prompt"])):
        completions: dict[str, tuple[Row, float | None]] = {}
        for row, reward in group:
            if row["completion_text"].strip() and row["finish_reason"] != "length" and not row.get("prompt_cut"):
                completions.setdefault(row["completion_text"], (row, reward))
        if len(completions) < 2:
            continue
        drawn = random.Random(derive_seed(seed, "label", prompt))
        given = list(completions.values())
        if all(reward is not None for _, reward in given):
            given.sort(key=lambda both: both[1] or 0.0)
            two = [given[0][0], given[-1][0]]
        else:
            two = [row for row, _ in drawn.sample(given, 2)]
        drawn.shuffle(two)
        row = {"prompt": as_given(two[0]) or two[0]["prompt_text"], "a": two[0]["completion_text"]}
        row |= {"b": two[1]["completion_text"], "source": two[0]["source"]}
        row |= {"tools": tools} if (tools := tools_of(two[0])) else {}
        chosen_pairs.append({"id": id_of(row), **row})
    if most is not None and len(chosen_pairs) > most:
        chosen = sorted(random.Random(derive_seed(seed, "labels")).sample(range(len(chosen_pairs)), most))
        chosen_pairs = [chosen_pairs[number] for number in chosen]
    return chosen_pairs


def pairs_of(
    store: Store,
    rollouts: Reference,
    scores: Reference | None,
    seed: int = 0,
    most: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[list[Row], int]:
    """The :func:`pairs` of rollouts and their scores in a store, and the number of prompts that were cut. Raises DataError if
    there is nothing to label, and NotFound."""
    from alignment_core.rollout.schemas import read_scores

    rewards = read_scores(store.fetch(scores)) if scores else None
    completions = completions_of(store, rollouts, trust_remote_code)
    chosen = pairs(completions, rewards, seed, most)
    if not chosen:
        raise DataError(
            "no whole prompt has two different completions to compare that are not truncated: sample more of each, at a higher "
            "temperature, or with a higher generation.max_completion_length; or raise prompts.max_prompt_length"
        )
    return chosen, len({row["prompt"] for row in completions if row["prompt_cut"]})


def scored_of(store: Store, reference: Reference) -> tuple[Reference, Reference | None]:
    """The rollouts and scores that a reference of either kind means. Raises UserError for another kind."""
    if reference.kind == "rollouts":
        return reference, None
    if reference.kind == "scores":
        makers = [made for made in store.records.makers(reference) if "rollouts" in made.inputs]
        if not makers:
            raise UserError(f"{reference.short} was imported, so its completions are unknown: give the rollouts")
        return makers[0].inputs["rollouts"], reference
    raise UserError(f"{reference} is a {reference.kind}; rollouts or scores are needed")


def id_of(row: Mapping[str, Any]) -> str:
    """Of a pair's content, whichever comes first: the same pair has the same id in every export."""
    tools = [row["tools"]] if row.get("tools") else []
    content = [row["prompt"], *tools, *sorted((row["a"], row["b"]))]
    return digest_of(json.loads(json.dumps(content)))[:DIGITS]


def exported(rows: Iterable[Row], format: Format) -> str:
    """The text of a file of pairs."""
    if format == "jsonl":
        return "".join(json.dumps({**row, QUESTION: None}, ensure_ascii=False) + "\n" for row in rows)
    records = [
        {
            "id": row["id"],
            "fields": {"prompt": _shown(row), "a": row["a"], "b": row["b"]},
            "metadata": {
                "source": row["source"],
                **{name: json.dumps(row[name], ensure_ascii=False) for name in ("prompt", "tools") if name in row},
            },
            "suggestions": {},
            "responses": {},
        }
        for row in rows
    ]
    return json.dumps(records, ensure_ascii=False, indent=2) + "\n"


def _shown(row: Row) -> str:
    """A prompt for annotators: with its role, even where it is a single message."""
    prompt, tools = row["prompt"], row.get("tools")
    if isinstance(prompt, list) and len(prompt) == 1 and not tools:
        return f"{prompt[0]['role']}: {text_of(prompt[0]['content'])}"
    return in_words(prompt, tools)


@dataclass(frozen=True)
class Vote:
    """An answer about a pair."""

    where: str
    who: str
    """The annotator; empty if that is unknown."""
    answer: str
    """One of ANSWERS: ``a`` and ``b`` are those of the known pair, whichever the row has first."""
    at: str = ""
    """Time of the answer, ISO 8601; empty if that is unknown."""


@dataclass
class Labels:
    """Imported labels."""

    rows: list[Row] = field(default_factory=list)
    """Preference rows, in the order of the pairs."""
    counts: Counter[str] = field(default_factory=Counter)
    """``pairs``, ``labelled``, ``ties`` (with those of which both are bad), ``skipped``, ``unlabelled``, ``changed`` and
    ``undone`` answers, ``duplicates``, ``conflicts``, ``unknown``, ``malformed``, ``contradicted`` by the inbox."""
    problems: list[str] = field(default_factory=list)
    """One sentence, with its place, for each row that was left out or counted once."""
    agreement: float | None = None
    """Krippendorff's alpha of the annotators; None if no two of them labelled the same pair."""


def imported(path: Path, known: Path | None = None) -> Labels:
    """Read labels. ``known`` is the file of pairs that was exported, without which each row has to hold its own pair.

    Several annotators' labels of a pair count by majority; of an annotator's, the last one counts. Raises UserError for a file
    that cannot be read, and for a row of ``known`` that is no pair.
    """
    labels = Labels()
    pairs_of = _pairs_by_id(known) if known else None
    votes: dict[str, list[Vote]] = defaultdict(list)
    content: dict[str, Row] = {}
    for where, row in _read(path):
        problem = row if isinstance(row, str) else _problem(row, pairs_of)
        if problem is not None:
            kind = "unknown" if problem.startswith("unknown") else "malformed"
            labels.counts[kind] += 1
            labels.problems.append(f"{where}: {problem}")
            continue
        pair = content.setdefault(row["id"], pairs_of[row["id"]] if pairs_of else row)
        if not row["answers"]:
            votes[row["id"]] += []
        for who, answer in row["answers"]:
            at = row["at"] if isinstance(row.get("at"), str) else ""
            _vote(labels, votes[row["id"]], Vote(where, who, _in_pair(answer, row, pair), at), row["id"])
    for identity, given in votes.items():
        _settle(labels, content[identity], given)
    labels.counts["pairs"] = len(votes)
    labels.agreement = agreement_of({vote.who: vote.answer for vote in given if vote.who} for given in votes.values())
    return labels


def agreement_of(answers: Iterable[Mapping[str, str]]) -> float | None:
    """Krippendorff's alpha of the answers about each pair, by annotator; ties and pairs of which both are bad are one category,
    and skips are none. None if no two annotators answered about one pair, or all answers are alike."""
    return krippendorff_alpha([category(answer) for answer in by.values() if answer != "skip"] for by in answers)


def category(answer: str) -> str:
    """``a``, ``b`` or ``tie``."""
    return "tie" if answer in NO_PREFERENCE else answer


def _in_pair(answer: str, row: Row, pair: Row) -> str:
    """An answer about a row in terms of the known pair, whose completions may be the other way round."""
    if answer in ("a", "b"):
        return "a" if row.get(answer, pair[answer]) == pair["a"] else "b"
    return answer


def _vote(labels: Labels, votes: list[Vote], vote: Vote, identity: str) -> None:
    """Add an answer to those about a pair, in place of the annotator's earlier one."""
    earlier = next((each for each in reversed(votes) if each.who == vote.who), None)
    if vote.answer == "undo":
        if earlier is not None:
            votes.remove(earlier)
            labels.counts["undone"] += 1
        return
    if vote.who and earlier is not None:
        votes.remove(earlier)
        if earlier.answer == vote.answer:
            labels.counts["duplicates"] += 1
            labels.problems.append(f"{vote.where}: {vote.who} has labelled {identity} before, alike; counted once")
        else:
            labels.counts["changed"] += 1
    votes.append(vote)


def _pairs_by_id(path: Path) -> dict[str, Row]:
    """The exported pairs. Raises UserError for a row that is none."""
    pairs_of: dict[str, Row] = {}
    for where, row in _read(path):
        problem = row if isinstance(row, str) else _not_a_pair(row)
        if problem is not None:
            raise UserError(f"{where}: {problem}; give the exported file with --pairs")
        pairs_of[row["id"]] = row
    return pairs_of


def _settle(labels: Labels, pair: Row, votes: list[Vote]) -> None:
    given = [vote for vote in votes if vote.answer != "skip"]
    if not given:
        labels.counts["skipped" if votes else "unlabelled"] += 1
        return
    counted = Counter(category(vote.answer) for vote in given).most_common()
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        labels.counts["conflicts"] += 1
        where = ", ".join(vote.where for vote in given)
        labels.problems.append(f"{where}: {pair['id']} has labels that contradict each other; left out")
        return
    if len(given) > 1 and len(counted) == 1 and len({vote.where for vote in given}) > 1:
        labels.counts["duplicates"] += len(given) - 1
        places = ", ".join(vote.where for vote in given)
        labels.problems.append(f"{places}: {pair['id']} is labelled several times, alike; counted once")
    winner = counted[0][0]
    if winner == "tie":
        labels.counts["ties"] += 1
        return
    labels.counts["labelled"] += 1
    other = "b" if winner == "a" else "a"
    tools = {"tools": pair["tools"]} if pair.get("tools") else {}
    winning = [vote for vote in given if vote.answer == winner]
    by = {"annotators": who} if (who := sorted({vote.who for vote in winning if vote.who})) else {}
    at = {"labelled_at": latest} if (latest := max(vote.at for vote in winning)) else {}
    row = {"prompt": pair["prompt"], **tools, "chosen": pair[winner], "rejected": pair[other]}
    labels.rows.append({**row, "pair": pair["id"], **by, **at})


def _problem(row: Row, known: Mapping[str, Row] | None) -> str | None:
    """The problem of a row, in a sentence that begins with ``unknown`` if it is none of the pairs."""
    if wrong := next((answer for _, answer in row["answers"] if answer not in ANSWERS), None):
        return f"`{QUESTION}` is {wrong!r}; one of {', '.join(ANSWERS)} is needed"
    if known is not None:
        if row["id"] not in known:
            return f"unknown id {row['id']!r}: it is none of the exported pairs"
        original = known[row["id"]]
        if any(name in row and row[name] != original[name] for name in ("a", "b")) and (
            {row.get("a"), row.get("b")} != {original["a"], original["b"]}
        ):
            return f"unknown pair: the texts of {row['id']} were changed"
        return None
    if problem := _not_a_pair(row):
        return f"{problem}; give the exported file with --pairs, or keep its fields"
    if row["id"] != id_of(row):
        return f"unknown id {row['id']!r}: it is not that of this pair; the texts were changed, or the id"
    return None


def _not_a_pair(row: Row) -> str | None:
    """The first field that a pair lacks, in a sentence."""
    missing = next((name for name in ("prompt", "a", "b") if name not in row), None)
    return f"there is no `{missing}`" if missing else None


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and row of each label, in one form, or what is wrong with it. Raises UserError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not JSON: {error}") from None
        for number, record in enumerate(records, start=1):
            yield f"{path.name}: record {number}", _of_argilla(record)
        return
    # splitlines() would also split at U+2028, U+2029 and U+0085, which texts in JSON may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path.name}:{number}", _of_line(line)


def _of_line(line: str) -> Row | str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return "is not JSON"
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return "there is no `id`"
    if problem := _not_texts(row):
        return problem
    answer = row.pop(QUESTION, None)
    return {**row, "answers": [] if answer is None else [(str(row.get("annotator", "")), _answer(answer))]}


def _of_argilla(record: Any) -> Row | str:
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return "there is no `id`"
    try:
        return _row_of_argilla(record)
    except (ValueError, RecursionError) as error:
        return f"`metadata` is not JSON: {error}"


def _row_of_argilla(record: Row) -> Row | str:
    """Raises ValueError and RecursionError for texts of ``metadata`` that are not JSON."""
    for name in ("fields", "metadata", "responses"):
        if not isinstance(record.get(name) or {}, dict):
            return f"`{name}` is no object"
    fields, metadata = record.get("fields") or {}, record.get("metadata") or {}
    row: Row = {"id": record["id"], **{name: fields[name] for name in ("a", "b") if name in fields}}
    if problem := _not_texts(row):
        return problem
    if isinstance(metadata.get("prompt"), str):
        row["prompt"] = json.loads(metadata["prompt"])
    elif "prompt" in fields:
        row["prompt"] = fields["prompt"]
    if isinstance(metadata.get("tools"), str):
        row["tools"] = json.loads(metadata["tools"])
    responses = (record.get("responses") or {}).get(QUESTION) or []
    if not isinstance(responses, list) or not all(isinstance(response, dict) for response in responses):
        return f"`responses.{QUESTION}` is no list of responses"
    row["answers"] = [(str(response.get("user_id", "")), _answer(response.get("value"))) for response in responses]
    return row


def _not_texts(row: Row) -> str | None:
    """The first of a pair's completions that is not a text, in a sentence."""
    wrong = next((name for name in ("a", "b") if name in row and not isinstance(row[name], str)), None)
    return f"`{wrong}` is no text" if wrong else None


def _answer(value: Any) -> str:
    return value.strip().lower() if isinstance(value, str) else repr(value)


def add_to_inbox(labels: Labels, inbox: Path) -> Path | None:
    """Write the preference rows as one file of an inbox, or None if each of them is there already.

    A row of a pair that earlier labels in the inbox prefer otherwise is left out and named, since nights would train on both,
    and counted under ``contradicted``. Raises EnvironmentFault if it cannot be written.
    """
    try:
        with open_lock(inbox / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others add, too
            return _added(labels, inbox)
    except OSError as error:
        raise EnvironmentFault(f"{inbox} cannot be written: {error.strerror}") from None


def _added(labels: Labels, inbox: Path) -> Path | None:
    there = {row["pair"]: row["chosen"] for path in sorted(inbox.glob("labels-*.jsonl")) for row in _rows_of(path)}
    new = [row for row in labels.rows if row["pair"] not in there]
    for row in labels.rows:
        if there.get(row["pair"], row["chosen"]) != row["chosen"]:
            labels.counts["contradicted"] += 1
            labels.problems.append(f"{row['pair']} is in the inbox with the other answer; left out")
    if not new:
        return None
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in new)
    path = inbox / f"labels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    write_whole(path, lambda file: file.write(text.encode()))
    return path


def _rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file of the inbox that name their pair; others were written by hand, or by earlier versions."""
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and "pair" in row and "chosen" in row:
                yield row
