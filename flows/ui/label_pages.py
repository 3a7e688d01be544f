"""The pages where people say which of two completions is better."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from alignment.flows.ui.guard import form_of
from alignment.flows.ui.rendering import page
from alignment_core import journal
from alignment_core.artifacts import Reference
from alignment_core.artifacts.index_snapshot import IndexSnapshot
from alignment_core.errors import AlignmentError, Conflict, Corrupt, EnvironmentFault, NotFound, UserError
from alignment_core.nights.labelling import PAIRS, Labelling, begun, check_name, folder_of
from alignment_core.nights.labels import Labels, add_to_inbox, imported
from alignment_core.processes import inherited
from alignment_core.recipes.paths import fixed_part

A_PAGE, LOOKED_AT = 50, 400
"""Rounds that are listed, of so many latest scores: those of evaluations are left out."""
ANNOTATOR = "annotator"
"""Cookie with the name of the one who labels."""
UNDO = "undo"
LARGEST_COUNT = 100_000
PAIRS_SECONDS = 300.0
LAST_WORDS = 200
"""Of the error of a process, which may follow warnings."""
Form = Mapping[str, str]
Change = Callable[["LabelPages", Request, Reference, Form], Response]


def edits(change: Change) -> Callable[[LabelPages, Request], Any]:
    """An endpoint that changes the labelling of the round that the address names, with the fields of a form."""

    @wraps(change)
    async def endpoint(self: LabelPages, request: Request) -> Response:
        form = await form_of(request)
        return await to_thread.run_sync(lambda: change(self, request, self.resolve(request), form))

    return endpoint


class LabelPages:
    """Pages over the pairs of a store's rounds; pairs and answers lie in the home."""

    def __init__(self, snapshot: IndexSnapshot) -> None:
        self.snapshot = snapshot
        self._guard = threading.Lock()
        self._open: dict[Reference, Labelling] = {}

    def resolve(self, request: Request) -> Reference:
        """The round that the address names. Raises UnknownName, and UserError for another kind of artifact.

        The store is not asked for a round whose pairs are here: people continue to label while it does not answer.
        """
        text = request.path_params["reference"]
        with suppress(UserError):
            if (folder_of(Reference.parse(text)) / PAIRS).exists():
                return Reference.parse(text)
        reference = self.snapshot.resolve(text)
        if reference.kind not in ("scores", "rollouts"):
            raise UserError(f"{reference.short} is a {reference.kind}: pairs are made of scores or rollouts")
        return reference

    def listed(self, request: Request) -> Response:
        """Rounds that are labelled, and scored completions that can be."""
        with self.snapshot.reading() as view:
            scored = view.search("", "scores", (), 0, LOOKED_AT)
        labelled, problems = [], []
        for reference in begun()[:A_PAGE]:
            try:
                labelled.append((reference, self._begun(reference)))
            except (AlignmentError, OSError) as error:
                problems.append(str(error))
        known = {reference for reference, _ in labelled}
        rounds = [
            entry
            for entry in scored
            if entry.reference not in known and entry.brief and "/evaluation/" not in entry.brief.label
        ]
        return self._page(request, "labels.html", labelled=labelled, problems=problems, rounds=rounds[:A_PAGE])

    def one(self, request: Request) -> Response:
        """The next pair; before the first one, the form that makes the pairs, and the one for the annotator's name."""
        reference = self.resolve(request)
        labelling, annotator = self._labelling(reference), self._annotator(request)
        shown = self._shown(labelling, annotator) if labelling and annotator else {}
        known = {"reference": reference, "labelling": labelling, "annotator": annotator, **shown}
        return self._page(request, "label.html", **known)

    @edits
    def begin(self, request: Request, reference: Reference, form: Form) -> Response:
        """Make the pairs, in a process of its own: it needs the policy's tokenizer."""
        most = form.get("most", "").strip()
        if most and not (most.isdecimal() and len(most) < 7 and 0 < int(most) <= LARGEST_COUNT):
            raise UserError(f"Maximum number of pairs: {most[:20]!r} is no whole number from 1 to {LARGEST_COUNT:,}")
        try:
            done = subprocess.run(
                [sys.executable, "-m", Labelling.__module__, self.snapshot.store.uri, str(reference), most],
                env=inherited(),
                capture_output=True,
                text=True,
                timeout=PAIRS_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentFault(
                f"the pairs were not made within {PAIRS_SECONDS:g} s: ask for fewer, or `align labels export` makes them"
            ) from None
        if done.returncode and self._labelling(reference) is None:
            raise UserError(" ".join(done.stderr.split()[-LAST_WORDS:]))
        return self._back(reference)

    @edits
    def name(self, request: Request, reference: Reference, form: Form) -> Response:
        """Keep the annotator's name in a cookie."""
        annotator = " ".join(form.get("annotator", "").split())
        check_name(annotator)
        response = self._back(reference)
        encoded = annotator.encode().hex()
        response.set_cookie(ANNOTATOR, encoded, max_age=365 * 86400, httponly=True, samesite="strict")
        return response

    @edits
    def answer(self, request: Request, reference: Reference, form: Form) -> Response:
        """Keep an answer, and show the next pair."""
        labelling, annotator = self._begun(reference), self._annotator(request)
        choice = form.get("answer", "")
        check_name(annotator)
        if form.get("annotator") != annotator:  # the name was changed in another tab
            raise Conflict(f"this page was for {form.get('annotator')}, and now {annotator} labels here: load it again")
        if choice == UNDO:
            labelling.undo(annotator, form.get("latest", ""))
        else:
            labelling.answer(annotator, form.get("pair", ""), choice)
        if "x-fragment" not in request.headers:
            return self._back(reference)
        shown = self._shown(labelling, annotator)
        return page(request, "label_pair.html", reference=reference, labelling=labelling, **shown)

    def results(self, request: Request) -> Response:
        """How many answers there are of whom; with the annotator's own ones complete, also what they are."""
        reference = self.resolve(request)
        return self._results(request, reference)

    @edits
    def to_inbox(self, request: Request, reference: Reference, form: Form) -> Response:
        """Add the labels to an inbox as preference rows."""
        inbox = form.get("inbox", "")
        if inbox not in _inboxes():
            raise UserError(
                f"Inbox {inbox!r}: no nightly run of this home takes rows from there; `align labels import` can"
            )
        labels = _imported(self._begun(reference))
        written = add_to_inbox(labels, Path(inbox))
        outcome = f"The new rows are in {written}." if written else "There is no new row."
        if contradicted := labels.counts["contradicted"]:
            outcome += f" {contradicted} pairs are in the inbox with the other answer, and stay so."
        return self._results(request, reference, outcome)

    def _results(self, request: Request, reference: Reference, outcome: str = "") -> Response:
        labelling, annotator = self._begun(reference), self._annotator(request)
        answers = labelling.answers()
        own = answers.get(annotator, {})
        done = request.scope["signed_in"] and len(own) == len(labelling.pairs)  # a name alone shows nothing
        return self._page(
            request,
            "label_results.html",
            reference=reference,
            labelling=labelling,
            answers=answers,
            done=done,
            agreement=labelling.agreement() if done else None,
            disputed=_disputed(labelling, answers, own)[:A_PAGE] if done else [],
            counts=_imported(labelling).counts if done and own else {},
            inboxes=_inboxes(),
            outcome=outcome,
        )

    def _shown(self, labelling: Labelling, annotator: str) -> dict[str, Any]:
        given = labelling.answers().get(annotator, {})
        return {
            "task": labelling.task(annotator),
            "given": len(given),
            "total": len(labelling.pairs),
            "latest": labelling.latest(annotator),
            "annotator": annotator,
        }

    def _labelling(self, reference: Reference) -> Labelling | None:
        """The pairs of a round and their answers; None if nobody has made the pairs. Raises Corrupt."""
        with self._guard:
            if reference not in self._open and (folder_of(reference) / PAIRS).exists():
                try:
                    self._open[reference] = Labelling(folder_of(reference))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise Corrupt(f"{folder_of(reference) / PAIRS} cannot be read: {error}") from None
            return self._open.get(reference)

    def _begun(self, reference: Reference) -> Labelling:
        labelling = self._labelling(reference)
        if labelling is None:
            raise NotFound(f"{reference.short}: its pairs are not made yet")
        return labelling

    def _annotator(self, request: Request) -> str:
        try:
            return bytes.fromhex(request.cookies.get(ANNOTATOR, "")).decode()
        except ValueError:
            return ""

    def _back(self, reference: Reference) -> Response:
        return RedirectResponse(f"/labels/{reference}", 303)

    def _page(self, request: Request, name: str, **values: Any) -> Response:
        return page(request, name, **{"snapshot": self.snapshot, **values})


def _imported(labelling: Labelling) -> Labels:
    return imported(labelling.file, labelling.folder / PAIRS)


def _disputed(
    labelling: Labelling, answers: Mapping[str, Mapping[str, str]], own: Mapping[str, str]
) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Pairs with different answers, with those by annotator; none that one skipped, who may come back to it."""
    given = {
        identity: {who: each[identity] for who, each in answers.items() if each.get(identity, "skip") != "skip"}
        for identity in labelling.pairs
        if own.get(identity, "skip") != "skip"
    }
    return [(labelling.pairs[identity], by) for identity, by in given.items() if len(set(by.values())) > 1]


def _inboxes() -> list[str]:
    """The folders that nightly runs of this home take rows from, the latest first."""
    folders: dict[str, None] = {}
    for record in reversed(journal.runs()):
        data = (record.recipe.get("dpo") or {}).get("data") if record.recipe.get("method") == "nightly" else None
        for source in data if isinstance(data, list) else [data]:
            path = source.get("path") if isinstance(source, dict) else source
            if isinstance(path, str) and ":" not in path:
                folders[str(fixed_part(Path(path).expanduser())[0])] = None
    return list(folders)[:10]
