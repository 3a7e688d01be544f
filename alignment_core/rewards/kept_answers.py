"""Answers of a server, saved as they come: a stage that was killed asks only for those that are missing."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path

from alignment_core.rewards.base import Rows, Source
from alignment_core.rewards.results import Answers, RewardValue, failure_of


class KeptAnswers:
    """A source whose numbers are lines of the file ``path``; it is not asked again for those that the file has.

    Each call has the same rows, also those of the process before. Failures and missing rewards are not saved: a server may
    answer the next time.
    """

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        self._path = path

    def __call__(self, rows: Rows) -> Answers:
        known = self._read()
        yield from known.items()
        missing = [number for number in range(len(rows)) if number not in known]
        if not missing:
            return
        with (
            self._path.open("a", encoding="utf-8") as file,
            closing(self._source([rows[number] for number in missing])) as answers,
        ):
            file.write("\n")  # a process that was killed may have left half a line
            for place, answer in answers:
                if failure_of(answer) is None and not isinstance(answer, RewardValue):
                    file.write(json.dumps([missing[place], answer]) + "\n")
                    file.flush()
                yield missing[place], answer

    def _read(self) -> dict[int, float]:
        known: dict[int, float] = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
        for line in lines:
            with suppress(ValueError):  # half a line
                number, answer = json.loads(line)
                known[number] = answer
        return known

    def close(self) -> None:
        self._source.close()
