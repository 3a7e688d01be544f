"""Statistics of a data set: rows read, kept and dropped by reason, and the lengths of the kept ones."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alignment_core.data import kinds
from alignment_core.data.kinds import Kind, Lengths
from alignment_core.data.limits import REASONS
from alignment_core.data.pin import PinnedSource
from alignment_core.errors import DataError

WARNING_SHARE = 0.05
"""Share of a source's rows that may be lost without a warning."""
LISTED = 5
"""Bad rows that an error names."""


class Ledger:
    """Counts rows by outcome, and refuses a data set with too many malformed ones."""

    def __init__(self, pinned: Sequence[PinnedSource], max_bad_rows: float, kind: Kind) -> None:
        self._names = [source.name for source in pinned]
        self._max_bad_rows = max_bad_rows
        self._reasons = {**REASONS, **kind.reasons}
        self._bad: list[str] = []
        self.read: Counter[int] = Counter()
        self.split: Counter[int] = Counter()
        self.shortened: Counter[int] = Counter()
        self.dropped: list[Counter[str]] = [Counter() for _ in pinned]
        self.unread: Counter[str] = Counter()
        """Number of rows or messages with a field that nothing reads, by the clause of the warning about it."""

    def bad(self, source: int, where: str, reason: str) -> None:
        """Note a malformed row. Raises DataError at once where none is allowed and enough were seen to name."""
        self.dropped[source]["malformed"] += 1
        if len(self._bad) < LISTED:
            self._bad.append(f"{where}: {reason}")
            if len(self._bad) == LISTED and not self._max_bad_rows:
                self._refuse(f"at least {LISTED} rows are malformed")

    def check_bad_rows(self) -> None:
        """Raise DataError if more rows were malformed than ``max_bad_rows`` allows."""
        count, read = self._total()["malformed"], self.read.total()
        if count > self._max_bad_rows * read:
            self._refuse(f"{count} of {_rows(read)} {'is' if count == 1 else 'are'} malformed")

    def check_rows_left(self, kept: Sequence[int], mixture: bool) -> None:
        """Raise DataError if nothing is left, or nothing of a source that a mixture is to draw from."""
        if not sum(kept):
            self._nothing_left(self._names, self.read.total(), self._total())
        for source, count in enumerate(kept):
            if mixture and not count:
                self._nothing_left([self._names[source]], self.read[source], self.dropped[source])

    def summary(
        self, kept: Sequence[int], train: Sequence[int], test: Sequence[int], unused: Sequence[int]
    ) -> dict[str, Any]:
        """Counts of rows, by source and together.

        One source row may give several table rows (``split``); ``unused`` ones were never drawn by a mixture. Of those
        that were kept, ``shortened`` ones had something cut off.
        """
        columns: dict[str, Counter[int] | Sequence[int]] = {
            "read": self.read,
            "split": self.split,
            "kept": kept,
            "train": train,
            "test": test,
            "unused": unused,
        }
        return {
            "rows": {
                name: sum(counts[source] for source in range(len(self._names))) for name, counts in columns.items()
            },
            "dropped": dict(sorted(self._total().items())),
            "shortened": self.shortened.total(),
            **({"unread": dict(sorted(self.unread.items()))} if self.unread else {}),
            "sources": [
                {
                    "name": name,
                    **{column: counts[source] for column, counts in columns.items()},
                    "dropped": dict(sorted(self.dropped[source].items())),
                    "shortened": self.shortened[source],
                }
                for source, name in enumerate(self._names)
            ],
        }

    def _total(self) -> Counter[str]:
        return sum(self.dropped, Counter())

    def _refuse(self, what: str) -> None:
        count = self._total()["malformed"]
        more = [f"… and {count - len(self._bad)} more"] if count > len(self._bad) else []
        listed = "\n".join(f"  {line}" for line in self._bad + more)
        raise DataError(f"{what} (max_bad_rows allows {self._max_bad_rows:.1%}):\n{listed}")

    def _nothing_left(self, names: Sequence[str], read: int, dropped: Mapping[str, int]) -> None:
        why = "; ".join(f"{count} {self._reasons[reason]} ({reason})" for reason, count in sorted(dropped.items()))
        raise DataError(f"no rows left of {_rows(read)} read from {', '.join(names)}" + (f": {why}" if why else ""))


def account(summary: Mapping[str, Any]) -> str:
    """The outcome of the rows in one line: ``288 of 400: 62 too_long, 50 test; 9 shortened``; ``summary`` is the ledger's.

    If some rows gave several: ``512 made of 400, 90 of them split``.
    """
    rows = summary["rows"]
    not_trained = {**summary["dropped"], "test": rows["test"], "not drawn": rows["unused"]}
    parts = ", ".join(f"{count} {reason}" for reason, count in not_trained.items() if count)
    shortened = f"{summary['shortened']} shortened" if summary["shortened"] else ""
    left_out = "; ".join(part for part in (parts, shortened) if part)
    read = f"made of {rows['read']}, {rows['split']} of them split" if rows["split"] else f"of {rows['read']}"
    return f"{rows['train']} {read}" + (f": {left_out}" if left_out else "")


def losses(summary: Mapping[str, Any], mixing: str, test_rows: int = 0) -> list[str]:
    """A sentence for each source of which more than ``WARNING_SHARE`` was dropped, shortened or never drawn, for each field
    that is not read, and one where fewer than half of ``test_rows`` could be held out."""
    kind = kinds.load(summary["kind"])
    warnings, reasons = not_read(summary.get("unread", {})), {**REASONS, **kind.reasons}
    if "today" in summary:
        warnings.append(
            f"the chat template asks for today's date (strftime_now): it gets {summary['today']}, whenever the data is built"
        )
    if 2 * summary["rows"]["test"] < test_rows:
        warnings.append(
            f"test_rows: {_rows(summary['rows']['test'])} are held out, not {test_rows}: rows that share a {kind.together} go "
            "to the same split, and the other groups of such rows are too large"
        )
    for source in summary["sources"]:
        dropped, read = sum(source["dropped"].values()), source["read"]
        if dropped > WARNING_SHARE * read:
            why = "; ".join(f"{count} {reasons[reason]} ({reason})" for reason, count in source["dropped"].items())
            warnings.append(f"{source['name']}: {dropped} of {_rows(read)} ({dropped / read:.0%}) are left out: {why}")
        shortened, kept = source["shortened"], source["kept"]
        if shortened > WARNING_SHARE * kept:
            warnings.append(
                f"{source['name']}: {shortened} of {_rows(kept)} ({shortened / kept:.0%}) are shortened to max_length or "
                "max_prompt_length, as `overlong: truncate` says"
            )
        drawable = source["kept"] - source["test"]
        if source["unused"] > WARNING_SHARE * drawable:
            warnings.append(
                f"{source['name']}: {source['unused']} of {_rows(drawable)} ({source['unused'] / drawable:.0%}) are never "
                f"used, because `mixing: {mixing}` stops when the first source is exhausted; see also `weight`"
            )
    return warnings


def not_read(unread: Mapping[str, int]) -> list[str]:
    """A sentence for each field that nothing reads."""
    return [f"{count} {have}" for have, count in unread.items()]


def lengths(rows: Iterable[Sequence[Lengths]]) -> dict[str, Any]:
    """Token counts of a table: distribution of prompt and completion lengths, total, share of targets, over the sequences that
    training makes of the rows."""
    prompts, completions = array("q"), array("q")
    for prompt, completion in (sequence for sequences in rows for sequence in sequences):
        prompts.append(prompt)
        if completion is not None:
            completions.append(completion)
    total = sum(prompts) + sum(completions)
    return {
        "prompt": _distribution(prompts),
        "completion": _distribution(completions),
        "total": total,
        "targets": sum(completions),
        "target_share": round(sum(completions) / total, 6) if total else 0.0,
    }


def images(rows: Iterable[Sequence[str]]) -> dict[str, int]:
    """Numbers of rows with images, of their images, and of different ones among these; nothing without any."""
    with_images, total, distinct = 0, 0, set[str]()
    for digests in rows:
        with_images += bool(digests)
        total += len(digests)
        distinct.update(digests)
    return {"rows": with_images, "total": total, "distinct": len(distinct)} if total else {}


def _distribution(counts: Sequence[int]) -> dict[str, float] | None:
    """Smallest, mean, median, 95th percentile (nearest rank) and largest of some counts; none of no counts."""
    if not counts:
        return None
    ranked = sorted(counts)

    def percentile(share: int) -> int:
        return ranked[-(-share * len(ranked) // 100) - 1]

    return {
        "min": ranked[0],
        "mean": round(sum(ranked) / len(ranked), 3),
        "p50": percentile(50),
        "p95": percentile(95),
        "max": ranked[-1],
    }


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
