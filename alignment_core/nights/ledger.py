"""The ledger of nights: an append-only history in the store of which rows were taken, when, and with which outcome.

Rows stay open until a night completes with them. After ``MAX_FAILED_ATTEMPTS`` attempts that ended in a way the rows may have
caused they are given up, so that they do not block later rows; people can return them.
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from alignment_core import journal
from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.artifacts.paths import night_path
from alignment_core.artifacts.reference import BATCH
from alignment_core.canonical import digest_of
from alignment_core.checks.shapes import shape_of
from alignment_core.composition import steps
from alignment_core.composition.graph import composing
from alignment_core.composition.plan import Plan
from alignment_core.data.image_reader import ImageReader
from alignment_core.data.images import FOLDER, keep_images
from alignment_core.data.rows_file import ROWS
from alignment_core.errors import AlignmentError, Conflict, EnvironmentFault, NotFound, UserError
from alignment_core.journal import STOPPING_SECONDS
from alignment_core.lineage import Graph
from alignment_core.methods.nightly import NightlyRecipe
from alignment_core.nights.inbox import Inbox, read_inbox

OVER = ("promoted", "refused", "empty", "discarded")
"""States after which a night has nothing left to do. After every other outcome its rows have still to be used."""
GIVEN_UP = "given_up"
"""State of rows that no night takes until a user returns them."""
MAX_FAILED_ATTEMPTS = 4
"""Attempts that ended in a way the rows may have caused, after which the rows are given up."""
LISTED = 100
"""Malformed rows that an entry names; all are counted."""
_NIGHT = "night.json"
_TAGS_BEGIN, _TAGS_END = "nightly/", "/nights"
_POLL_SECONDS = 0.05


class Night(BaseModel):
    """One entry: that a night took rows, or its outcome."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")  # metrics may be infinite or NaN

    night: str
    """Its name, such as the time at which it was due."""
    state: Literal[
        "claimed",
        "promoted",
        "refused",
        "conflict",
        "empty",
        "failed",
        "stopped",
        "given_up",
        "returned",
        "discarded",
    ] = "claimed"
    """``stopped``: ended on purpose before it was complete. ``given_up``: no night takes its rows until a user makes
    them ``returned`` (the next night takes them) or ``discarded``."""
    at: str = ""
    """When the entry was made, ISO 8601 in UTC."""
    run: str = ""
    """Flow run."""
    batch: Reference | None = None
    """The rows that it took."""
    attempt: int = 0
    """Number of nights that have claimed these rows, including this one."""
    failed_attempts: int = 0
    """Number of attempts at these rows that ended in a way that the rows may have caused: a death of the night's process, or
    a failure of its stages. Orderly stops, outages, wrong recipes and conflicts do not count."""
    rows: int = 0
    """Rows in the batch; for an empty night those that wait because they are too few."""
    malformed_rows: int = 0
    malformed: tuple[str, ...] = ()
    """The first of the malformed rows, as ``file:line: reason``."""
    inbox: tuple[str, ...] = ()
    """One sentence for each source of the inbox: its path, files and rows."""
    production: Reference | None = None
    """The policy under the promotion's tag when the rows were claimed: the night starts from it and may replace only it."""
    candidate: Reference | None = None
    """The model that it made."""
    reasons: tuple[str, ...] = ()
    """Why nothing was promoted."""
    metrics: dict[str, dict[str, float]] = {}
    """Of ``candidate`` and ``production``, or ``start`` where there was none yet."""
    changed_weights: dict[str, float] = {}
    """Share of the weights that each training of the policy changed, by the label of its stage."""


@dataclass(frozen=True)
class Claim:
    """The outcome of a night's claim of rows."""

    night: Night
    """``claimed``: train on its batch. In any other state the night is over, and this is the entry that says so."""
    batches_before: int = 0
    """Number of batches of rows that were claimed before this one."""
    given_up: tuple[Night, ...] = ()
    """Entries of rows that this claim gave up, because the processes of their nights died too often."""


class AlreadyRuns(AlignmentError):
    """Another process is running the same night, and will record its outcome."""


class History:
    """The nights of one inbox, kept as the history of one tag, which moves by compare-and-set."""

    def __init__(self, store: Store, inbox: str) -> None:
        self.store = store
        self.tag = f"{_TAGS_BEGIN}{inbox}{_TAGS_END}"

    def nights(self) -> list[Night]:
        """Every entry, oldest first."""
        return [self.read(move.to) for move in self.store.tags.history(self.tag)]

    def batches(self) -> list[Night]:
        """The latest entry of every batch of rows, in the order in which they were first taken."""
        return list(_latest(self.nights()).values())

    def given_up(self) -> list[Night]:
        """The latest entries of the batches that were given up and neither returned nor discarded."""
        return [entry for entry in self.batches() if entry.state == GIVEN_UP]

    def record(self, night: Night) -> Night:
        """Append an outcome, retrying while other nights append.

        An outcome that leaves the rows open is not appended where another night has taken them since: they are that
        night's now.
        """
        while True:
            # Read before the entries: an entry that is appended meanwhile makes the compare-and-set below fail.
            head = self.store.tags.get(self.tag)
            if night.batch and night.state not in OVER:
                latest = _latest(self.nights()).get(night.batch)
                if latest and (latest.night, latest.attempt) != (night.night, night.attempt):
                    return night
            try:
                return self._append(night, head)
            except Conflict:
                time.sleep(_POLL_SECONDS)

    def decide(self, batch: str, state: Literal["returned", "discarded"]) -> Night:
        """Return rows that were given up to the next night, or discard them for good. ``batch`` is their reference or the
        first characters of its digest. Raises UserError if no batch, or more than one, that was given up matches.
        """
        while True:
            head, waiting = self.store.tags.get(self.tag), self.given_up()
            digits = batch.rpartition(":")[2]
            chosen = [entry for entry in waiting if digits and entry.batch and entry.batch.digest.startswith(digits)]
            if len(chosen) != 1:
                known = ", ".join(entry.batch.short for entry in waiting if entry.batch) or "none"
                problem = "matches several batches" if chosen else "is not a batch that was given up"
                raise UserError(f"{batch}: {problem} in {self.tag}; given up: {known}")
            update = {"state": state, "failed_attempts": 0, "reasons": ("by hand",)}
            try:
                return self._append(chosen[0].model_copy(update=update), head)
            except Conflict:
                time.sleep(_POLL_SECONDS)

    def _append(self, night: Night, head: Reference | None) -> Night:
        """Make an entry if the ledger still ends with ``head``. Raises Conflict otherwise."""
        night = night.model_copy(update={"at": journal.now()})
        with self.store.workspace.scratch() as scratch:
            (scratch / _NIGHT).write_text(night.model_dump_json(indent=2))
            entry = self.store.publish(scratch, "night")
        self.store.tags.move(self.tag, entry, expected=head, reason=summary(night))
        return night

    def read(self, reference: Reference) -> Night:
        """The entry of an artifact that the tag pointed to."""
        return Night.model_validate_json((self.store.fetch(reference) / _NIGHT).read_text())


def inboxes(store: Store) -> list[str]:
    """The names of the ledgers in a store."""
    return sorted(
        name.removeprefix(_TAGS_BEGIN).removesuffix(_TAGS_END)
        for name in store.tags.all()
        if name.startswith(_TAGS_BEGIN) and name.endswith(_TAGS_END)
    )


class Ledger(History):
    """The history of one inbox, from which a recipe's nights take rows."""

    def __init__(self, store: Store, recipe: NightlyRecipe) -> None:
        super().__init__(store, recipe.nightly.inbox or recipe.name)
        self.recipe = recipe

    def has_in_production(self, batch: Reference | None) -> bool:
        """Whether the production policy was trained on a batch."""
        now = self.store.tags.get(self.recipe.promotion.tag)
        if now is None or batch is None:
            return False
        with Graph.of(self.store) as graph:
            return graph.descends(now, batch)

    def was_working_on_rows(self, entry: Night, unknown: bool) -> bool:
        """Whether a stage that depends on the rows of a night was under way or failed, by the journal of its run; ``unknown``
        where this ALIGN_HOME has none."""
        try:
            journal.read(entry.run)
        except NotFound:
            return unknown
        lines = [line for line in journal.stages(entry.run).values() if line.state in ("running", "failed")]
        inputs = [Reference.parse(text) for line in lines for text in line.key_parts.get("inputs", {}).values()]
        with Graph.of(self.store) as graph:
            return any(
                reference == entry.batch or (entry.batch and graph.descends(reference, entry.batch))
                for reference in inputs
            )

    def _rows_may_have_killed(self, entry: Night) -> bool:
        """Whether the process of a claimed night, which holds its rows no longer, may have died of them.

        The journal of its run can show that it did not: the process lives, or ended by itself and could not write into the
        store, or was at no stage that depends on the rows.
        """
        with suppress(NotFound):
            if journal.status_of(journal.read(entry.run)) != "died":
                return False
        return self.was_working_on_rows(entry, unknown=True)

    @contextmanager
    def claim(self, night: str, run: str = "") -> Iterator[Claim]:
        """Take rows for a night. They are its own for the length of the ``with``, or until this process dies.

        Its own rows, if it was interrupted; else those of the oldest batch whose night died, was stopped, failed or lost the
        race; else the new rows of the inbox. Raises AlreadyRuns if another process goes on running the same night
        (one that stops needs some time), or UserError for an inbox that does not exist.
        """
        given_up: list[Night] = []
        deadline = time.monotonic() + STOPPING_SECONDS
        with ExitStack() as leases:
            while True:
                try:
                    claim = self._try_to_claim(Night(night=night, run=run), leases, given_up)
                    break
                except Conflict:  # the ledger moved since it was read
                    leases.close()
                except AlreadyRuns:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_SECONDS)
            yield claim

    def _try_to_claim(self, draft: Night, leases: ExitStack, given_up: list[Night]) -> Claim:
        """One attempt. Raises Conflict if another night was faster."""
        head = self.store.tags.get(self.tag)
        nights = self.nights()
        own_entry = next((night_entry for night_entry in reversed(nights) if night_entry.night == draft.night), None)
        if own_entry and own_entry.state in OVER:
            return Claim(own_entry, given_up=tuple(given_up))
        last = _latest(nights)
        for batch, entry in sorted(last.items(), key=lambda item: item[1] is not own_entry):
            if entry.state in OVER or entry.state == GIVEN_UP:
                continue
            if not self._lease(batch, leases):
                if entry is own_entry and entry.state == "claimed":
                    raise AlreadyRuns(f"the night {draft.night} is being run by another process: wait until it ends")
                continue
            # The lease was free because its night ended after the ledger was read: its outcome may be in the ledger by now.
            if self.store.tags.get(self.tag) != head:
                raise Conflict("its night has ended since")
            batches_before = list(last).index(batch)
            production = self._production(batch, entry)
            if entry is own_entry and entry.state == "claimed" and production == entry.production:
                return Claim(entry, batches_before, tuple(given_up))
            died = entry.state == "claimed" and self._rows_may_have_killed(entry)
            failed = entry.failed_attempts + died
            if failed >= MAX_FAILED_ATTEMPTS:
                update = {"state": GIVEN_UP, "failed_attempts": failed, "reasons": ("the process of its night died",)}
                given_up.append(self._append(given_up_entry(entry.model_copy(update=update)), head))
                raise Conflict("the ledger has changed")
            update = {"batch": batch, "attempt": entry.attempt + 1, "failed_attempts": failed}
            update |= {"rows": entry.rows, "production": production}
            return Claim(self._append(draft.model_copy(update=update), head), batches_before, tuple(given_up))
        return self._claim_new_rows(draft, head, set(last), leases, tuple(given_up))

    def _claim_new_rows(
        self,
        draft: Night,
        head: Reference | None,
        taken: Set[Reference],
        leases: ExitStack,
        given_up: tuple[Night, ...],
    ) -> Claim:
        with self.store.workspace.scratch() as images:
            reads = functools.cache(lambda: ImageReader(images) if self._reads_images() else None)
            inbox = read_inbox(self.recipe.dpo.data.sources, self._digests(taken), self.store, reads)
            return self._claim_rows(draft, head, inbox, images, taken, leases, given_up)

    def _claim_rows(
        self,
        draft: Night,
        head: Reference | None,
        inbox: Inbox,
        images: Path,
        taken: Set[Reference],
        leases: ExitStack,
        given_up: tuple[Night, ...],
    ) -> Claim:
        """Claim the rows of an inbox, whose images are in the folder ``images``."""
        count = len(inbox.malformed)
        findings = {"rows": len(inbox.rows), "malformed_rows": count, "malformed": tuple(inbox.malformed[:LISTED])}
        findings |= {"inbox": tuple(inbox.looked)}
        if len(inbox.rows) < self.recipe.nightly.min_rows:
            return Claim(self._append(draft.model_copy(update={**findings, "state": "empty"}), head), given_up=given_up)
        batch = self._publish(inbox, images, draft)
        if not self._lease(batch, leases):
            raise Conflict("another night is taking the same rows")
        production = self.store.tags.get(self.recipe.promotion.tag)
        night = draft.model_copy(update={**findings, "batch": batch, "attempt": 1, "production": production})
        return Claim(self._append(night, head), len(taken), given_up)

    def _production(self, batch: Reference, last: Night) -> Reference | None:
        """The policy to start from: present production, unless it was already trained on these rows.

        Then their night died after its promotion; started from the same policy again, all of its stages are cached.
        """
        now = self.store.tags.get(self.recipe.promotion.tag)
        if now is None or now == last.production:
            return now
        return last.production if self.has_in_production(batch) else now

    def _lease(self, batch: Reference, leases: ExitStack) -> bool:
        """Lease the batch for this process; False if another process that is alive has it."""
        lease = self.store.leases.acquire(night_path(batch.digest), self.tag)
        if lease is not None:
            leases.callback(lease.release)
        return lease is not None

    def _reads_images(self) -> bool:
        """Whether the recipe's model, whose tokenizer prepares the rows, is an image-text model. Raises EnvironmentFault if its
        config.json cannot be read now: rows that are taken as text once stay without their images."""
        plan = Plan(self.store, self.recipe.seed)
        with composing(plan):
            model: Any = steps.base_model("model", self.recipe.model)
        if not (shape := shape_of(self.store, model)):
            raise EnvironmentFault(
                f"model: {self.recipe.model.name}: rows of the inbox have images, and the model's config.json, which says "
                "whether it reads them, cannot be read now: try again once it can be"
            )
        return bool(shape.get("vision_config"))

    def _publish(self, inbox: Inbox, images: Path, draft: Night) -> Reference:
        """The rows and their images as an artifact, which is the same for the same rows."""
        started, rows = journal.now(), inbox.rows
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
            keep_images((digest for row in rows for digest in row.images), images, scratch / FOLDER)
            provenance = ProvenanceDraft(
                key=digest_of({"stage": BATCH, "rows": digests, "sources": sources}),
                stage=BATCH,
                label=f"{self.tag.removesuffix('/nights')}/rows",
                config={"sources": read},
                started_at=started,
                finished_at=journal.now(),
                metrics={"rows": len(rows)},
                run_ids={"prefect": draft.run} if draft.run else {},
            )
            return self.store.publish(scratch, BATCH, provenance)

    def _digests(self, batches: Set[Reference]) -> set[str]:
        """The digests of all rows that were claimed before."""
        digests = set()
        for batch in batches:
            with (self.store.fetch(batch) / ROWS).open(encoding="utf-8") as lines:
                digests |= {json.loads(line)["sha256"] for line in lines}
        return digests


def given_up_entry(night: Night) -> Night:
    """The entry for rows that are given up, with the reason and the way back."""
    back = "`align nights return` gives them to the next night again"
    reason = f"given up after {night.failed_attempts} attempts that ended in a way these rows may have caused; {back}"
    return night.model_copy(update={"state": GIVEN_UP, "reasons": (*night.reasons, reason)})


def _latest(nights: list[Night]) -> dict[Reference, Night]:
    """The latest entry of every batch, in the order of the first claims."""
    return {entry.batch: entry for entry in nights if entry.batch}


def summary(night: Night) -> str:
    """The entry in one line."""
    rows = f"{night.rows} row{'' if night.rows == 1 else 's'}"
    waiting = f"empty, {rows} waiting" if night.rows else "empty"
    texts = {"claimed": f"takes {rows}", "empty": waiting, GIVEN_UP: f"{rows} given up"}
    text = texts.get(night.state, f"{night.state}, {rows}")
    again = f", attempt {night.attempt}" if night.attempt > 1 else ""
    again += f" ({night.failed_attempts} of {MAX_FAILED_ATTEMPTS} failed)" if night.failed_attempts else ""
    malformed = f", {night.malformed_rows} malformed" if night.malformed_rows else ""
    shares = ", ".join(f"{share:.2g} by {label}" for label, share in night.changed_weights.items())
    changed = f", share of changed weights {shares}" if shares else ""
    reasons = f": {'; '.join(night.reasons)}" if night.reasons else ""
    looked = f" ({'; '.join(night.inbox)})" if night.inbox else ""
    return f"night {night.night}: {text}{again}{malformed}{changed}{reasons}{looked}"
