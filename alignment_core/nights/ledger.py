"""The ledger of nights: an append-only history in the store of which rows were taken, when, and with which outcome."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.artifacts.paths import night_path
from alignment_core.canonical import digest_of
from alignment_core.data.rows_file import ROWS
from alignment_core.errors import AlignmentError, Conflict
from alignment_core.journal import STOPPING_SECONDS
from alignment_core.lineage import Graph
from alignment_core.nights.inbox import Inbox, read_inbox
from alignment_core.recipes.methods.nightly import NightlyRecipe

OVER = ("promoted", "refused", "empty")
"""States after which a night has nothing left to do. After a conflict or a failure its rows wait for a later night."""
ATTEMPTS = 4
"""How often the same rows are taken: once, and three times more where a night died, failed or lost the race."""
LISTED = 100
"""Malformed rows that an entry names; all are counted."""
_NIGHT = "night.json"
_POLL_SECONDS = 0.05


class Night(BaseModel):
    """One entry: that a night took rows, or its outcome."""

    model_config = ConfigDict(frozen=True)

    night: str
    """Its name, such as the time at which it was due."""
    state: Literal["claimed", "promoted", "refused", "conflict", "empty", "failed"] = "claimed"
    at: str = ""
    """When the entry was made, ISO 8601 in UTC."""
    run: str = ""
    """Flow run."""
    batch: Reference | None = None
    """The rows that it took."""
    attempt: int = 0
    """How often these rows have been taken, this time included."""
    rows: int = 0
    """Rows in the batch; for an empty night those that wait because they are too few."""
    malformed_rows: int = 0
    malformed: tuple[str, ...] = ()
    """The first of the malformed rows, as ``file:line: reason``."""
    inbox: tuple[str, ...] = ()
    """Where it looked for new rows, and what was there, one sentence for each source."""
    production: Reference | None = None
    """What the promotion's tag named when the rows were taken: where the night starts, and all that it may replace."""
    candidate: Reference | None = None
    """The model that it made."""
    reasons: tuple[str, ...] = ()
    """Why nothing was promoted."""
    metrics: dict[str, dict[str, float]] = {}
    """Of ``candidate`` and ``production``, or ``start`` where there was none yet."""


@dataclass(frozen=True)
class Claim:
    """What a night may do."""

    night: Night
    """``claimed``: train on its batch. In any other state the night is over, and this is the entry that says so."""
    number: int = 0
    """How many batches were taken before this one."""
    given_up: tuple[Night, ...] = ()
    """Entries for rows of dead nights that were taken too often, made on the way."""


class AlreadyRuns(AlignmentError):
    """Another process is running the same night, and will record its outcome."""


class Ledger:
    """The nights of one inbox: all of it is the history of one tag, which moves by compare-and-set."""

    def __init__(self, store: Store, recipe: NightlyRecipe) -> None:
        self.store, self.recipe = store, recipe
        self.tag = f"nightly/{recipe.nightly.inbox or recipe.name}/nights"

    def nights(self) -> list[Night]:
        """Every entry, oldest first."""
        return [self._read(move.to) for move in self.store.tag_history(self.tag)]

    def record(self, night: Night) -> Night:
        """Append an outcome, whatever other nights append meanwhile."""
        while True:
            try:
                return self._append(night, self.store.tag(self.tag))
            except Conflict:
                time.sleep(_POLL_SECONDS)

    @contextmanager
    def claim(self, night: str, run: str = "", patience: float = STOPPING_SECONDS) -> Iterator[Claim]:
        """Take rows for a night. They are its own for the length of the ``with``, or until this process dies.

        Its own rows, if it was interrupted; else those of the oldest batch whose night is dead, failed or lost the race,
        so that no row is lost; else the new rows of the inbox. Raises AlreadyRuns if another process runs the same night
        for ``patience`` more seconds (one that stops needs some), or UserError for an inbox that does not exist.
        """
        given_up: list[Night] = []
        deadline = time.monotonic() + patience
        with ExitStack() as held:
            while True:
                try:
                    claim = self._take(Night(night=night, run=run), held, given_up)
                    break
                except Conflict:  # the ledger moved since it was read
                    held.close()
                except AlreadyRuns:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_SECONDS)
            yield claim

    def _take(self, draft: Night, held: ExitStack, given_up: list[Night]) -> Claim:
        """One try. Raises Conflict if another night was faster."""
        head = self.store.tag(self.tag)
        nights = self.nights()
        mine = next((one for one in reversed(nights) if one.night == draft.night), None)
        if mine and mine.state in OVER:
            return Claim(mine, given_up=tuple(given_up))
        last = {one.batch: one for one in nights if one.batch}  # in the order of the first claims
        for batch, entry in sorted(last.items(), key=lambda item: item[1] is not mine):
            tired = entry.attempt >= ATTEMPTS
            if entry.state in OVER or (tired and entry.state != "claimed"):
                continue
            if not self._hold(batch, held):
                if entry is mine and entry.state == "claimed":
                    raise AlreadyRuns(f"the night {draft.night} is being run by another process: wait until it ends")
                continue
            if self.store.tag(self.tag) != head:
                raise Conflict("its night has ended since")
            number, production = list(last).index(batch), self._production(batch, entry)
            if entry is mine and entry.state == "claimed" and production == entry.production:
                return Claim(entry, number, tuple(given_up))
            if tired:
                reason = f"the process of its night died each of the {ATTEMPTS} times that these rows were taken"
                given_up.append(self._append(entry.model_copy(update={"state": "failed", "reasons": (reason,)}), head))
                raise Conflict("the ledger has changed")
            update = {"batch": batch, "attempt": entry.attempt + 1, "rows": entry.rows, "production": production}
            return Claim(self._append(draft.model_copy(update=update), head), number, tuple(given_up))
        return self._take_new(draft, head, set(last), held, tuple(given_up))

    def _take_new(
        self, draft: Night, head: Reference | None, taken: Set[Reference], held: ExitStack, given_up: tuple[Night, ...]
    ) -> Claim:
        inbox = read_inbox(self.recipe.dpo.data.sources, self._digests(taken), self.store)
        count = len(inbox.malformed)
        found = {"rows": len(inbox.rows), "malformed_rows": count, "malformed": tuple(inbox.malformed[:LISTED])}
        found |= {"inbox": tuple(inbox.looked)}
        if len(inbox.rows) < self.recipe.nightly.min_rows:
            return Claim(self._append(draft.model_copy(update={**found, "state": "empty"}), head), given_up=given_up)
        batch = self._publish(inbox, draft)
        if not self._hold(batch, held):
            raise Conflict("another night is taking the same rows")
        production = self.store.tag(self.recipe.promotion.tag)
        night = draft.model_copy(update={**found, "batch": batch, "attempt": 1, "production": production})
        return Claim(self._append(night, head), len(taken), given_up)

    def _production(self, batch: Reference, last: Night) -> Reference | None:
        """Where to start from: production as it is now, unless these very rows are in it already.

        Then their night died after it had promoted; from where it started, all its stages are found again.
        """
        now = self.store.tag(self.recipe.promotion.tag)
        if now is None or now == last.production:
            return now
        with Graph.of(self.store) as graph:
            return last.production if graph.descends(now, batch) else now

    def _hold(self, batch: Reference, held: ExitStack) -> bool:
        """Keep the batch for this process, unless another one that lives has it."""
        lease = self.store.leases.take(night_path(batch.digest), self.tag)
        if lease is not None:
            held.callback(lease.release)
        return lease is not None

    def _append(self, night: Night, head: Reference | None) -> Night:
        """Make an entry if the ledger still ends with ``head``. Raises Conflict otherwise."""
        night = night.model_copy(update={"at": _now()})
        with self.store.workspace.scratch() as scratch:
            (scratch / _NIGHT).write_text(night.model_dump_json(indent=2))
            entry = self.store.publish(scratch, "night")
        self.store.move_tag(self.tag, entry, expected=head, reason=summary(night))
        return night

    def _read(self, reference: Reference) -> Night:
        return Night.model_validate_json((self.store.fetch(reference) / _NIGHT).read_text())

    def _publish(self, inbox: Inbox, draft: Night) -> Reference:
        """The rows as an artifact: the same rows are the same artifact, whoever takes them."""
        started, rows = _now(), inbox.rows
        digests = [row.digest for row in rows]
        files = Counter(row.where.rpartition(":")[0] for row in rows)
        sources = [{"path": path, "rows": count} for path, count in files.items()]
        read = [{**source, "sha256": inbox.files.get(str(source["path"]))} for source in sources]
        lines = [
            json.dumps({**row.pair, "from": row.where, "sha256": row.digest}, ensure_ascii=False, default=str)
            for row in rows
        ]
        with self.store.workspace.scratch() as scratch:
            (scratch / ROWS).write_text("\n".join(lines) + "\n", encoding="utf-8")
            provenance = ProvenanceDraft(
                key=digest_of({"stage": "preference-batch", "rows": digests, "sources": sources}),
                stage="preference-batch",
                label=f"{self.tag.removesuffix('/nights')}/rows",
                config={"sources": read},
                started_at=started,
                finished_at=_now(),
                metrics={"rows": len(rows)},
                run_ids={"prefect": draft.run} if draft.run else {},
            )
            return self.store.publish(scratch, "preference-batch", provenance)

    def _digests(self, batches: Set[Reference]) -> set[str]:
        """The rows that were taken before."""
        found = set()
        for batch in batches:
            with (self.store.fetch(batch) / ROWS).open(encoding="utf-8") as lines:
                found |= {json.loads(line)["sha256"] for line in lines}
        return found


def summary(night: Night) -> str:
    """One line: what the entry says."""
    rows = f"{night.rows} row{'' if night.rows == 1 else 's'}"
    waiting = f"empty, {rows} waiting" if night.rows else "empty"
    text = {"claimed": f"takes {rows}", "empty": waiting}.get(night.state, f"{night.state}, {rows}")
    again = f", attempt {night.attempt} of {ATTEMPTS}" if night.attempt > 1 else ""
    malformed = f", {night.malformed_rows} malformed" if night.malformed_rows else ""
    reasons = f": {'; '.join(night.reasons)}" if night.reasons else ""
    looked = f" ({'; '.join(night.inbox)})" if night.inbox else ""
    return f"night {night.night}: {text}{again}{malformed}{reasons}{looked}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
