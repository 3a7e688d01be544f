"""The test split: rows that share a prompt go to the same side, so that no target of a test row is trained on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alignment_core.data.kinds import Example, Lengths
from alignment_core.data.overlap import digests_before_answers
from alignment_core.data.statistics import Ledger
from alignment_core.errors import DataError


@dataclass(frozen=True, slots=True)
class RowMeta:
    """The part of a row that stays in memory; its columns are on disk."""

    number: int
    """Of the row among all of them."""
    source: int
    example: int
    """Number of the example that it came from: a conversation may give several rows."""
    digest: str
    """Of the example's content, before any tokenizer touched it."""
    prompts: tuple[str, ...]
    """Digests of the prompts that it trains answers to."""
    context: tuple[str, ...]
    """Digests of further prompts with answers in the row: a model reads these answers and is not trained on them."""
    sequences: Sequence[Lengths]


def prompts_of(example: Example, last_turn: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``prompts`` and ``context`` of the rows of an example; with ``last_turn`` its last answer alone is trained."""
    trained = example.prompts()[-1:] if last_turn else example.prompts()
    parts = (getattr(example, name, None) for name in ("prompt", "completion"))
    messages = [message for part in parts if isinstance(part, list) for message in part]
    context = (prompt for prompt in digests_before_answers(messages) if prompt not in trained)
    return trained, tuple(context)


def groups(rows: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """For each row, given as its ``prompts`` and ``context``, the name of its group: the smallest digest of a prompt in it.

    Rows are in one group where one trains an answer to a prompt that the other holds, as a prompt or in its context, and
    so on from row to row. A prompt that is only ever context, such as the examples of a few-shot prompt, joins nothing.
    """
    rows = list(rows)
    trained = {prompt for prompts, _ in rows for prompt in prompts}
    above: dict[str, str] = {prompt: prompt for prompt in trained}

    def root(prompt: str) -> str:
        while above[prompt] != prompt:
            above[prompt] = prompt = above[above[prompt]]
        return prompt

    for prompts, context in rows:
        first = root(prompts[-1])
        for other in (*prompts, *context):
            if other in trained:
                smaller, larger = sorted((first, root(other)))
                above[larger] = smaller
                first = smaller
    return [root(prompts[-1]) for prompts, _ in rows]


def hold_out(rows: list[RowMeta], count: int, ledger: Ledger, together: str) -> tuple[list[RowMeta], list[RowMeta]]:
    """Split off about ``count`` rows as a test set: the groups with the smallest names. Returns training and test rows.

    Membership depends on the prompts of a row and of those in its group alone, so more data moves few rows. A group that
    would bring the test set further above ``count`` than it is below stays in training. Of copies of a test row one is
    kept. Raises DataError if either side would be empty.
    """
    if not count:
        return rows, []
    by_group: defaultdict[str, list[RowMeta]] = defaultdict(list)
    names = groups((row.prompts, row.context) for row in rows)
    for row, name in zip(rows, names, strict=True):
        by_group[name].append(row)
    test: list[RowMeta] = []
    held_out: set[str] = set()
    for name in sorted(by_group):
        distinct, copies = _without_copies(by_group[name])
        missing = count - len(test)
        if missing <= 0:
            break
        if len(distinct) - missing > missing:
            continue
        held_out.add(name)
        test += distinct
        for row in copies:
            ledger.dropped[row.source]["duplicate_of_test"] += 1
    train = [row for row, name in zip(rows, names, strict=True) if name not in held_out]
    if not (train and test):
        raise DataError(_nothing_to_split(rows, count, list(by_group.values()), together, bool(test)))
    return train, test


def _nothing_to_split(
    rows: list[RowMeta], count: int, by_group: list[list[RowMeta]], together: str, all_test: bool
) -> str:
    """The error if one side of the split would be empty."""
    largest = max(by_group, key=len)
    if len(by_group) == 1:
        size = f"all {len(rows)} rows are in one group"
    else:
        size = f"of {len(by_group)} groups the largest has {len(largest)} rows"
        size += ", which leaves none to train on" if all_test else ", and all are too large"
    sentence = (
        f"test_rows: cannot hold out {count} of {len(rows)} usable rows: rows that share a {together} go to the same split, "
        f"and {size}"
    )
    if any(len(row.prompts) > 1 for row in largest) and not all_test:
        sentence += (
            ". Conversations that begin alike share the prompts of their first turns; with `assistant_turns: last` only the "
            "last turn of each is trained, and only its prompt counts"
        )
    return sentence


def held_out_sources(rows: list[RowMeta], held_out: set[int], ledger: Ledger) -> tuple[list[RowMeta], list[RowMeta]]:
    """Training rows, without those that hold an answer to a prompt of a test row, and test rows: all of the held-out sources.

    Raises DataError without test rows.
    """
    test = [row for row in rows if row.source in held_out]
    if not test:
        raise DataError("held_out: no rows left of the sources that are held out")
    prompts = {prompt for row in test for prompt in row.prompts}
    train = []
    for row in rows:
        if row.source not in held_out:
            if prompts.isdisjoint(row.prompts) and prompts.isdisjoint(row.context):
                train.append(row)
            else:
                ledger.dropped[row.source]["prompt_of_test"] += 1
    return train, test


def _without_copies(rows: list[RowMeta]) -> tuple[list[RowMeta], list[RowMeta]]:
    """The rows of distinct examples, and those of their copies; one example may have several rows."""
    first: dict[str, tuple[int, int]] = {}
    for row in rows:
        first.setdefault(row.digest, (row.source, row.example))
    is_first = [first[row.digest] == (row.source, row.example) for row in rows]
    return (
        [row for row, kept in zip(rows, is_first, strict=True) if kept],
        [row for row, kept in zip(rows, is_first, strict=True) if not kept],
    )


def counts(rows: Sequence[RowMeta], sources_in_all: int) -> list[int]:
    """Number of rows of each source."""
    per_source = Counter(row.source for row in rows)
    return [per_source[source] for source in range(sources_in_all)]
