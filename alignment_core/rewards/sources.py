"""All rewards of a stage: opened once, called as often as needed, closed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace

from alignment_core.data.completion_text import CompletionText, with_special_tokens
from alignment_core.errors import Stopped, UserError
from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import Opening, Rows, Source, kind_of
from alignment_core.rewards.kept_answers import KeptAnswers
from alignment_core.rewards.results import SHOWN, Account, RewardResult

log = logging.getLogger(__name__)
NO_IMAGES = (
    "it reads text, and prompts or observations have images: use an image-text reward model, a judge at an endpoint (`judge`, "
    "which sees the images of prompts), a verifier or a function"
)
"""Why a kind of reward that ``reads_text`` is refused."""


class RewardSources:
    """The open rewards; a context manager to enter while trainers or engines are held.

    Calling it with rows of completions returns one list of results for each reward. Rewards are computed at the same time.
    Calls may come from any thread and are processed one by one; closing it ends every process that it started and any call in
    progress (with Stopped, except a reward model's). ``failed`` counts missing rewards by reason. Raises DataError if more than
    a reward's ``max_failed`` of the last ``step`` rows failed, and UserError for prompts or observations with images and a
    kind of reward that does not see them.

    Args: ``opening.field`` is the list's field in the recipe; ``models`` are the models of rewards, by their numbers; ``step``
    is the number of completions of a step.
    """

    def __init__(
        self, rewards: Sequence[RewardConfig], opening: Opening, models: Mapping[int, Model] = {}, step: int = 0
    ) -> None:
        self._rewards = rewards
        self._kinds = [kind_of(reward) for reward in rewards]
        self._calling = threading.Lock()
        self._over = opening.over
        self._openings = [
            replace(opening, field=f"{opening.field}.{number}", model=models.get(number))
            for number in range(len(rewards))
        ]
        if opening.images_in_observations or any(prompt.get("images") for prompt in opening.prompts):
            self._check_images()
        self._accounts = [
            Account(kind.description(reward), reward.max_failed, f"{opened.field}.max_failed", step, reward.missing)
            for kind, reward, opened in zip(self._kinds, rewards, self._openings, strict=True)
        ]
        self._texts: CompletionText | None = None
        if not all(reward.skip_special_tokens for reward in rewards):
            self._texts = CompletionText(opening.tokenizer, opening.turn_end, skip_special_tokens=False)
        self._sources: dict[int, Source] = {}
        self._unrewarded_seen = False
        self._open = ExitStack()
        try:
            self._start(actors=False)  # so that missing files are reported before actors start
        except BaseException:
            self.stop()
            raise

    def _check_images(self) -> None:
        """Raise UserError for a reward that would not see images."""
        for kind, reward, opening in zip(self._kinds, self._rewards, self._openings, strict=True):
            if kind.reads_text:
                raise UserError(f"{opening.field}.{reward.KEY}: {NO_IMAGES}")
            kind.check_images(opening)

    def _start(self, actors: bool) -> None:
        for number, (kind, reward) in enumerate(zip(self._kinds, self._rewards, strict=True)):
            if kind.actors == actors:
                opening = self._openings[number]
                source = self._sources[number] = kind.open(reward, opening)
                if kind.kept and opening.progress:
                    self._sources[number] = KeptAnswers(source, opening.progress / f"answers-{number}.jsonl")
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
        """End the call in progress, except a reward model's, and refuse further ones. From any thread."""
        self._over.set()
        for number, source in list(self._sources.items()):
            if not self._kinds[number].actors:
                source.close()

    def __call__(self, rows: Rows) -> list[list[RewardResult]]:
        with self._calling:
            if self._over.is_set():
                raise Stopped("the rewards were closed")
            results = self._compute(rows)
        self._warn_of_unrewarded(rows, results)
        return results

    def _compute(self, rows: Rows) -> list[list[RewardResult]]:
        if len(self._accounts) == 1:
            return [self._compute_one(0, rows)]
        with ThreadPoolExecutor(len(self._accounts), "reward") as threads:
            try:
                futures = [threads.submit(self._compute_one, number, rows) for number in range(len(self._accounts))]
                done, _ = wait(futures, return_when="FIRST_EXCEPTION")
            except BaseException:  # an interrupt must not wait for the threads
                self.stop()
                raise
            if any(future.exception() for future in done):
                self.stop()  # the results of the others are not needed
        failures = [error for future in futures if (error := future.exception())]
        # Rewards that were stopped because of a failure say so too: the failure itself comes first.
        for error in sorted(failures, key=lambda error: isinstance(error, Stopped)):
            raise error
        return [future.result() for future in futures]

    def _warn_of_unrewarded(self, rows: Rows, results: list[list[RewardResult]]) -> None:
        """Log the first completion that every reward ignores, once; the stage reports their number."""
        if self._unrewarded_seen:
            return
        for row, given in zip(rows, zip(*results, strict=True), strict=True):
            if all(result is None for result in given):
                self._unrewarded_seen = True
                log.warning(
                    "%s: every reward returned None for a completion of the prompt %r; it is left out, as are further ones",
                    row["source"],
                    row["prompt_text"][:SHOWN],
                )
                return

    def _compute_one(self, number: int, rows: Rows) -> list[RewardResult]:
        if self._texts and not self._rewards[number].skip_special_tokens:
            rows = with_special_tokens(rows, self._texts)
        return self._accounts[number].settle(rows, self._sources[number](rows))

    @property
    def recent(self) -> list[str]:
        """For each reward, the failures among the last rows: plain data for a checkpoint."""
        return [account.recent for account in self._accounts]

    def restore(self, recent: Sequence[str]) -> None:
        """Continue with the last rows of the run that wrote :attr:`recent`."""
        for account, digits in zip(self._accounts, recent, strict=True):
            account.restore(digits)

    @property
    def failed(self) -> Counter[str]:
        """Number of missing rewards since this was opened, by reason."""
        counts: Counter[str] = Counter()
        for account in self._accounts:
            counts.update(account.failed)
        return counts
