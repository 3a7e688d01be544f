"""All that rewards the completions of a stage: opened once, asked as often as needed, closed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace

from alignment_core.data.completion_text import CompletionText, with_special_tokens
from alignment_core.errors import Stopped
from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import Opening, Rows, Source, kind_of
from alignment_core.rewards.results import SHOWN, Account, RewardResult

log = logging.getLogger(__name__)


class RewardSources:
    """Everything that ``rewards`` names; a context manager to enter while trainers or engines are held.

    Calling it with rows of completions gives one list for each source: a finite number for each row, why there is none, or
    None where the source leaves the row to the others.
    The sources are asked at the same time. It may be called from any thread, one call at a time is worked on, and closing it
    ends every process that it started and any call that is under way (with Stopped, but for a reward model's). ``failed``
    counts what had no reward, by reason. Raises DataError where more than a reward's ``max_failed`` of the last ``step``
    rows have none.

    Args: ``opening.field`` is where the recipe has the list; ``models`` are those that rewards need, by the
    reward's number; ``step`` is how many completions a step has.
    """

    def __init__(
        self, rewards: Sequence[RewardConfig], opening: Opening, models: Mapping[int, Model] = {}, step: int = 0
    ) -> None:
        self._rewards, self._kinds = rewards, [kind_of(reward) for reward in rewards]
        self._calling, self._over = threading.Lock(), opening.over
        self._openings = [
            replace(opening, field=f"{opening.field}.{number}", model=models.get(number))
            for number in range(len(rewards))
        ]
        self._accounts = [
            Account(kind.who(reward), reward.max_failed, f"{one.field}.max_failed", step, reward.missing)
            for kind, reward, one in zip(self._kinds, rewards, self._openings, strict=True)
        ]
        self._texts: CompletionText | None = None
        if not all(reward.skip_special_tokens for reward in rewards):
            self._texts = CompletionText(opening.tokenizer, skip_special_tokens=False)
        self._sources: dict[int, Source] = {}
        self._unrewarded_seen = False
        self._open = ExitStack()
        try:
            self._start(actors=False)  # what is missing is said before actors are started
        except BaseException:
            self.stop()
            raise

    def _start(self, actors: bool) -> None:
        for number, (kind, reward) in enumerate(zip(self._kinds, self._rewards, strict=True)):
            if kind.actors == actors:
                source = self._sources[number] = kind.open(reward, self._openings[number])
                if actors:
                    self._open.callback(source.close)

    def __enter__(self) -> RewardSources:
        with self._open:
            self._start(actors=True)
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._open.close()

    def stop(self) -> None:
        """Give no more rewards, and end the call that is under way, unless it is a reward model's. From any thread."""
        self._over.set()
        for number, source in list(self._sources.items()):
            if not self._kinds[number].actors:
                source.close()

    def __call__(self, rows: Rows) -> list[list[RewardResult]]:
        with self._calling:
            if self._over.is_set():
                raise Stopped("the rewards were closed")
            results = self._ask_all(rows)
        self._warn_of_unrewarded(rows, results)
        return results

    def _ask_all(self, rows: Rows) -> list[list[RewardResult]]:
        if len(self._accounts) == 1:
            return [self._ask(0, rows)]
        with ThreadPoolExecutor(len(self._accounts), "reward") as threads:
            try:
                asked = [threads.submit(self._ask, number, rows) for number in range(len(self._accounts))]
                done, _ = wait(asked, return_when="FIRST_EXCEPTION")
            except BaseException:  # an interrupt waits for no threads
                self.stop()
                raise
            if any(one.exception() for one in done):
                self.stop()  # nobody waits for what the others would give
        failures = [error for one in asked if (error := one.exception())]
        for error in sorted(failures, key=lambda error: isinstance(error, Stopped)):
            raise error
        return [one.result() for one in asked]

    def _warn_of_unrewarded(self, rows: Rows, results: list[list[RewardResult]]) -> None:
        """Log the first completion that every source ignores, once; the stage reports how many there were."""
        if self._unrewarded_seen:
            return
        for row, given in zip(rows, zip(*results, strict=True), strict=True):
            if all(one is None for one in given):
                self._unrewarded_seen = True
                log.warning(
                    "%s: every reward returned None for a completion of the prompt %r; it is left out, as are further ones",
                    row["source"],
                    row["prompt_text"][:SHOWN],
                )
                return

    def _ask(self, number: int, rows: Rows) -> list[RewardResult]:
        if self._texts and not self._rewards[number].skip_special_tokens:
            rows = with_special_tokens(rows, self._texts)
        return self._accounts[number].settle(rows, self._sources[number](rows))

    @property
    def recent(self) -> list[str]:
        """For each reward, which of the last rows failed."""
        return [account.recent for account in self._accounts]

    def restore(self, recent: Sequence[str]) -> None:
        """Continue with the last rows of the run that wrote :attr:`recent`."""
        for account, digits in zip(self._accounts, recent, strict=True):
            account.restore(digits)

    @property
    def failed(self) -> Counter[str]:
        """Rewards that were not given since this was opened, by reason."""
        counts: Counter[str] = Counter()
        for account in self._accounts:
            counts.update(account.failed)
        return counts
