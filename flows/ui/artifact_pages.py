"""The pages about artifacts: the list, and of each one what made it, what it touched, what changed, why it was promoted, how it
is rebuilt, and its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from alignment.flows.ui.curves import curve
from alignment.flows.ui.evidence import Shown, records_of
from alignment.flows.ui.guard import form_of
from alignment.flows.ui.lanes import Ancestry, ancestry
from alignment.flows.ui.rendering import HEADERS, page, start_of
from alignment.flows.ui.sample_rows import SampleRows
from alignment_core import journal
from alignment_core.artifacts import Provenance, Reference, open_store
from alignment_core.artifacts.index import View
from alignment_core.artifacts.index_facts import Brief
from alignment_core.artifacts.index_snapshot import IndexSnapshot
from alignment_core.artifacts.promotion import promote
from alignment_core.data.images import FOLDER as IMAGES
from alignment_core.errors import AlignmentError, NotFound, UserError
from alignment_core.evaluation.metric_names import METRICS
from alignment_core.lineage import decision as decisions
from alignment_core.lineage.decision import Decision
from alignment_core.lineage.diff import compare_in
from alignment_core.lineage.graph import Graph
from alignment_core.lineage.rebuild import behind, plan
from alignment_core.lineage.sources import settings_of, sources_of
from alignment_core.tracking.metrics_file import Points, read_points

TABS = {
    "": "What made it",
    "touched": "What it touched",
    "changed": "What changed",
    "promoted": "Why promoted",
    "rebuild": "Rebuild",
    "files": "Files and samples",
}
A_PAGE = 50
_MEASURED = re.compile(r"([\w/-]+) *(<=|>=|<|>|=) *(-?[0-9]+\.?[0-9]*(?:e-?[0-9]+)?)")
"""A search by a metric: ``accuracy > 0.7``."""
PICTURES = {
    "image/png": rb"\x89PNG\r\n",
    "image/jpeg": rb"\xff\xd8\xff",
    "image/gif": rb"GIF8",
    "image/webp": rb"(?s)RIFF....WEBP",
    "image/bmp": rb"BM",
}
"""Types of images that are shown, and how their files begin."""
MOST_PLANNED = 300
"""Stages of a rebuild."""
FIRST_KINDS = ("model", "reward-model", "critic", "dataset")
DESCRIBED = 5
"""Stages that are named on the page of a recipe or an environment that describes them."""


class ArtifactPages:
    """Pages over a snapshot of a store's index."""

    def __init__(self, snapshot: IndexSnapshot) -> None:
        self.snapshot = snapshot
        self.store = snapshot.store
        self._known_decisions: dict[Reference, Decision] = {}
        self._samples = SampleRows(snapshot)

    def listed(self, request: Request) -> Response:
        """All artifacts, the latest first, 50 a page; filters are in the address."""
        query, kind = request.query_params.get("q", "").strip(), request.query_params.get("kind", "")
        start = start_of(request)
        with self.snapshot.reading() as view:
            kinds = view.kinds()
            if measured := _MEASURED.fullmatch(query):
                name, comparison, value = measured.groups()
                only = view.measured(name, comparison, float(value))
                matches = view.search("", kind, (), start, A_PAGE + 1, only)
            else:
                matches = view.search(query, kind, self._tagged(query), start, A_PAGE + 1)
        return self._page(
            request,
            "artifacts.html",
            kinds=kinds,
            kind=kind,
            query=query,
            rows=matches[:A_PAGE],
            start=start,
            more=len(matches) > A_PAGE,
        )

    def _tagged(self, query: str) -> set[Reference]:
        """Artifacts that a tag with this text points to, or pointed to."""
        if not query:
            return set()
        return {
            reference
            for reference, moves in self.snapshot.moves.items()
            if any(query.lower() in move.name.lower() for move in moves)
        }

    def one(self, request: Request) -> Response:
        """A page of the artifact that the address names: a reference, the first digits of one, or a tag."""
        path = request.path_params["path"]
        text, _, tab = path.rpartition("/")
        if tab not in TABS or not text or self.snapshot.tag(path):
            text, tab = path, ""
        pages = {
            "": self.made,
            "touched": self.touched,
            "changed": self.changed,
            "promoted": self.promoted,
            "rebuild": self.rebuild,
            "files": self.files,
        }
        return pages[tab](request, self.snapshot.resolve(text))

    def made(self, request: Request, reference: Reference) -> Response:
        """What made it: lanes, with sources at the left, and evaluations and tags at the right."""
        with self.snapshot.reading() as view:
            behind_it = ancestry(view, reference, "all" in request.query_params)
            records, evidence = records_of(view, behind_it)
        shown = Shown(records, evidence, self._decisions_of(behind_it))
        return self._artifact(
            request, reference, "", ancestry=behind_it, shown=shown, sources_of=sources_of, settings_of=settings_of
        )

    def touched(self, request: Request, reference: Reference) -> Response:
        """What it touched: the tags and artifacts that descend from it."""
        with self.snapshot.reading() as view:
            descendants = view.descendants(reference)
            by_kind: dict[str, list[Reference]] = {}
            for descendant in sorted(descendants):
                by_kind.setdefault(descendant.kind, []).append(descendant)
            makers = view.outputs([each for several in by_kind.values() for each in several[:A_PAGE]])
        kinds: dict[str, list[tuple[Reference, Brief]]] = {}
        for descendant, brief in sorted(makers.items(), key=lambda made: made[1].finished_at, reverse=True):
            kinds.setdefault(descendant.kind, []).append((descendant, brief))
        order = sorted(kinds, key=lambda kind: (FIRST_KINDS.index(kind) if kind in FIRST_KINDS else 9, kind))
        moves = [
            (move, self.snapshot.tags.get(move.name) == tagged)
            for tagged in (reference, *descendants)
            for move in self.snapshot.moves.get(tagged, ())
        ]
        moves.sort(key=lambda entry: (not entry[1], entry[0].name, -entry[0].number))
        ordered = {kind: kinds[kind] for kind in order}
        totals = {kind: len(several) for kind, several in by_kind.items()}
        return self._artifact(
            request, reference, "touched", kinds=ordered, totals=totals, tagged=moves, total=len(descendants)
        )

    def changed(self, request: Request, reference: Reference) -> Response:
        """What changed against its predecessor, the artifact of a tag, or any other."""
        with self.snapshot.reading() as view:
            before = self._predecessor(view, reference)
        against = request.query_params.get("against", "").strip()
        problem, other, difference = "", before, None
        try:
            other = self.snapshot.resolve(against) if against else before
            if other:
                manifests = self.snapshot.manifest(other), self.snapshot.manifest(reference)
                with self.snapshot.reading() as view:
                    difference = compare_in(view, *manifests)
        except AlignmentError as error:
            problem = str(error)
        return self._artifact(
            request,
            reference,
            "changed",
            other=other,
            difference=difference,
            against=against,
            refused=problem,
            before=before,
        )

    def promoted(self, request: Request, reference: Reference) -> Response:
        """Why it was promoted, or was not: the decisions about it, and the moves of tags to it."""
        with self.snapshot.reading() as view:
            promotions = [brief for brief in view.using(reference) if brief.stage == decisions.STAGE]
        about_it: list[tuple[Reference, Decision]] = []
        unreadable: list[str] = []
        for brief in promotions:
            if brief.inputs.get("policy") == reference:
                for output in brief.outputs.values():
                    try:
                        about_it.append((output, self._decision(output)))
                    except (AlignmentError, OSError, ValueError) as error:
                        unreadable.append(f"the decision {output.short} cannot be read: {error}")
        about_it.sort(key=lambda entry: entry[1].at, reverse=True)
        moves = list(reversed(self.snapshot.moves.get(reference, [])))
        tags = self.snapshot.tags
        return self._artifact(
            request, reference, "promoted", decisions=about_it, moves=moves, unreadable=unreadable, tags=tags
        )

    async def move_tag(self, request: Request) -> Response:
        """Point a tag to the artifact, if the tag still points to what the page showed."""
        form = await form_of(request)
        return await to_thread.run_sync(
            lambda: self._move_tag(self.snapshot.resolve(request.path_params["reference"]), form)
        )

    def _move_tag(self, reference: Reference, form: Mapping[str, str]) -> Response:
        name, reason = form.get("tag", "").strip(), form.get("reason", "").strip()
        if not reason:
            raise UserError("Reason: say why the tag is moved")
        shown = form.get(f"now:{name}")
        promote(open_store(self.store.uri), name, reference, Reference.parse(shown) if shown else None, reason)
        self.snapshot.refresh()
        return RedirectResponse(f"/artifacts/{reference}/promoted", 303)

    def rebuild(self, request: Request, reference: Reference) -> Response:
        """What a rebuild would run, and what would differ."""
        planned, problem = None, ""
        try:
            with self.snapshot.reading() as view:
                records = behind(Graph.over(view), reference)
            if len(records) > MOST_PLANNED:
                raise UserError(
                    f"{len(records)} stages are more than a page plans: align reproduce {reference} --check"
                )
            planned = plan(self.store, reference, reads_sources=False, records=records)
        except AlignmentError as error:
            problem = str(error)
        return self._artifact(request, reference, "rebuild", plan=planned, refused=problem)

    def image(self, request: Request) -> Response:
        """An image of a data set. Raises NotFound for a file that is none, or of a type that browsers may run."""
        reference, digest = self.snapshot.resolve(request.path_params["reference"]), request.path_params["digest"]
        path = f"{IMAGES}/{digest}"
        entry = next((entry for entry in self.snapshot.manifest(reference).files if entry.path == path), None)
        content = self.store.blobs.read(reference.short, entry) if entry else b""
        media = next((media for media, begins in PICTURES.items() if re.match(begins, content)), None)
        if media is None:
            raise NotFound(f"{reference.short} has no image {digest[:12]} that is shown here")
        return Response(content, media_type=media, headers=HEADERS)

    def files(self, request: Request, reference: Reference) -> Response:
        """Its files, metrics, curves and settings, and rows of it."""
        record = self._record(reference)
        manifest = self.snapshot.manifest(reference)
        curves = []
        if record is not None:
            points = _points(record)
            names = dict.fromkeys(
                name for _, metrics in points for name in metrics if name in METRICS and METRICS[name].curve
            )
            drawn = (curve(METRICS[name].title, [(step, m[name]) for step, m in points if name in m]) for name in names)
            curves = [line for line in drawn if line is not None]
        return self._artifact(
            request,
            reference,
            "files",
            manifest=manifest,
            curves=curves,
            rows=self._samples.of(reference, record, start_of(request)),
            settings=settings_of(record) if record else {},
        )

    def _decisions_of(self, ancestors: Ancestry) -> dict[Reference, Decision]:
        """The decisions behind the moves of tags to the models of the lanes that are shown; those that can be read."""
        models = [lane.makes for lane in ancestors.lanes if lane.makes and not lane.left_out]
        named = [move.decision for model in models for move in self.snapshot.moves.get(model, ()) if move.decision]
        known: dict[Reference, Decision] = {}
        for reference in named:
            with suppress(AlignmentError, OSError, ValueError):
                known[reference] = self._decision(reference)
        return known

    def _decision(self, reference: Reference) -> Decision:
        """A decision, which never changes. Raises NotFound, Corrupt, OSError or ValueError."""
        if reference not in self._known_decisions:
            self._known_decisions[reference] = decisions.read(self.store, reference)
        return self._known_decisions[reference]

    def _predecessor(self, view: View, reference: Reference) -> Reference | None:
        """The artifact of the same kind that it was made from at the shortest distance; the one before it under a tag."""
        for brief in view.history(reference):
            if reference in brief.outputs.values():
                for used in brief.inputs.values():
                    if used.kind == reference.kind:
                        return used
        moves = self.snapshot.moves.get(reference, [])
        return moves[-1].previous if moves else None

    def _record(self, reference: Reference) -> Provenance | None:
        with self.snapshot.reading() as view:
            return next(iter(view.makers(reference)), None)

    def _artifact(self, request: Request, reference: Reference, tab: str, **values: Any) -> Response:
        with self.snapshot.reading() as view:
            record = next(iter(view.makers(reference)), None)
            described = [record.label for record in view.described(reference)[:DESCRIBED]] if record is None else []
        run = None
        if record is not None:
            with suppress(NotFound, OSError, ValueError):
                run = journal.read(record.run_ids["prefect"]) if "prefect" in record.run_ids else None
        known = {"reference": reference, "record": record, "run": run, "described": described}
        pruned = self.snapshot.is_pruned(reference)
        return self._page(
            request, f"artifact_{tab or 'made'}.html", tab=tab, tabs=TABS, pruned=pruned, **known, **values
        )

    def _page(self, request: Request, name: str, **values: Any) -> Response:
        return page(
            request, name, snapshot=self.snapshot, problem=self.snapshot.problem, age=self.snapshot.age, **values
        )


def _points(record: Provenance) -> Points:
    """The curve of a stage, if its run is one of this home."""
    try:
        run = journal.read(record.run_ids.get("prefect", ""))
        return read_points(journal.folder_of(run.run_id)).get(record.label, [])
    except (NotFound, OSError, ValueError):
        return []
