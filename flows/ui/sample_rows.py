"""Rows of artifacts for people: prompts with their completions, pairs side by side, tokens shaded by probability or loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.artifacts import FileEntry, Provenance, Reference
from alignment_core.artifacts.index_snapshot import IndexSnapshot
from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.data.images import FOLDER
from alignment_core.errors import AlignmentError
from alignment_core.lineage.samples import DATA, HIDDEN, SHARDS, STEPS, text_of
from alignment_core.rollout.schemas import SCORES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

A_PAGE = 4
"""Rows, or prompts with all of their completions."""
MOST_COMPLETIONS, MOST_TOKENS, MOST_IMAGES = 4, 300, 8
LARGEST_READ = 64 << 20
"""Bytes of an artifact that a page fetches to show some of its rows."""
SHADES = ((-2.3026, "p3"), (-0.6931, "p2"), (-0.1054, "p1"))
"""Highest log-probability of a shade: of probabilities below 0.1, 0.5 and 0.9."""
MASKED = "masked"
"""The look of tokens without a loss."""
TOKENIZER = "tokenizer.json"
TOKENIZERS, PAGES = 8, 16
"""So many are kept."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that look alike."""

    text: str
    look: str = ""
    """Class of the style sheet: a shade, or :data:`MASKED`."""
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A completion, one half of a pair, or a text."""

    pieces: list[Piece]
    look: str = ""
    notes: str = ""


@dataclass(frozen=True)
class Sample:
    """A row, or a prompt with its completions."""

    prompt: str
    texts: list[Text]
    fields: dict[str, str] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    """Digests of its first images."""


@dataclass(frozen=True)
class Samples:
    """Some rows of an artifact, from the one with the number ``start``."""

    samples: list[Sample]
    start: int
    total: int
    is_shaded: bool = False
    is_masked: bool = False
    problem: str = ""
    of: str = ""
    """The artifact with its images."""

    @property
    def more(self) -> bool:
        return self.start + len(self.samples) < self.total


def without_images(snapshot: IndexSnapshot, reference: Reference) -> list[FileEntry]:
    """The files of an artifact but its images, each of which a page fetches when it shows it."""
    return [entry for entry in snapshot.manifest(reference).files if not entry.path.startswith(f"{FOLDER}/")]


@contextmanager
def fetched(snapshot: IndexSnapshot, reference: Reference) -> Iterator[Path]:
    """A folder with the files of an artifact but its images."""
    store, entries = snapshot.store, without_images(snapshot, reference)
    if len(entries) == len(snapshot.manifest(reference).files):
        yield store.fetch(reference)
        return
    with store.workspace.scratch() as scratch:
        for entry in entries:
            (scratch / entry.path).parent.mkdir(parents=True, exist_ok=True)
            store.blobs.get(reference.short, entry, scratch / entry.path)
        yield scratch


class SampleRows:
    """Rows of the artifacts of a store, whose tokens are shown by the tokenizers of its models."""

    def __init__(self, snapshot: IndexSnapshot) -> None:
        self.snapshot = snapshot
        self._tokenizer = lru_cache(maxsize=TOKENIZERS)(self._read_tokenizer)
        self._shown = lru_cache(maxsize=PAGES)(self._read)

    def of(self, reference: Reference, record: Provenance | None, start: int) -> Samples | None:
        """Rows of an artifact; None if it has no rows."""
        if self.snapshot.is_pruned(reference):
            return None
        rollouts = record.inputs.get("rollouts") if record and reference.kind == "scores" else None
        try:
            return self._shown(reference, rollouts, record.inputs.get("tokenizer") if record else None, start)
        except (
            AlignmentError,
            OSError,
            ValueError,
            LookupError,
            ArithmeticError,
        ) as error:  # damaged, or of another version
            return Samples([], 0, 0, problem=f"Its rows cannot be read: {error}")

    def _read(
        self, reference: Reference, rollouts: Reference | None, tokenizer: Reference | None, start: int
    ) -> Samples | None:
        """Rows of an artifact, whose bytes never change. Raises what reading them raises."""
        paths = [entry.path for entry in self.snapshot.manifest(reference).files]
        forms = (SHARDS, SCORES, STEPS, DATA)
        form = next((form for form in forms for path in paths if fnmatchcase(path, form)), None)
        if form is None or (form == SCORES and rollouts is None):
            return None
        read = [reference, *([rollouts] if form == SCORES and rollouts else [])]
        if sum(entry.size for each in read for entry in without_images(self.snapshot, each)) > LARGEST_READ:
            return Samples([], 0, 0, problem=f"Rows of artifacts above {LARGEST_READ >> 20} MiB are not shown here.")
        with ExitStack() as until:
            folder, *others = [until.enter_context(fetched(self.snapshot, each)) for each in read]
            if form == SHARDS:
                return self._groups(sorted(folder.glob(SHARDS)), "logps", start)
            if form == SCORES:
                return self._groups(sorted(others[0].glob(SHARDS)), "logps", start, _scores_in(folder))
            if form == STEPS:  # the last step that was kept
                return self._groups(sorted(folder.glob(STEPS))[-1:], "rollout_logps", start)
            return replace(self._data(folder, tokenizer, start), of=str(reference))

    def _groups(
        self,
        paths: Sequence[Path],
        logps: str,
        start: int,
        scores: Mapping[tuple[int, int], dict[str, Any]] | None = None,
    ) -> Samples:
        """Prompts with their completions."""
        import pyarrow.parquet as pq

        names = pq.read_schema(paths[0]).names
        group = "group" if "group" in names else "prompt"
        numbers = [number for path in paths for number in pq.read_table(path, columns=[group])[group].to_pylist()]
        prompts = list(dict.fromkeys(numbers))
        shown = prompts[start : start + A_PAGE]
        rows = [row for path in paths for row in pq.read_table(path, filters=[(group, "in", shown)]).to_pylist()]
        tokenizer = self._of_model(Reference.parse(rows[0]["policy"])) if rows else None
        samples = []
        for number in shown:
            several = [row for row in rows if row[group] == number]
            texts = [
                Text(
                    _shaded(tokenizer, row["completion_ids"], row[logps], row.get("mask"), row["completion_text"]),
                    notes=_notes({**row, **((scores or {}).get((row["prompt"], row["sample"])) or {})}),
                )
                for row in several[:MOST_COMPLETIONS]
            ]
            label = {"label": several[0]["label"]} if several[0]["label"] is not None else {}
            hidden = len(several) - MOST_COMPLETIONS
            more = {"not shown": f"{hidden} more completions"} if hidden > 0 else {}
            samples.append(Sample(several[0]["prompt_text"], texts, {**label, **more}))
        masked = any(piece.look == MASKED for sample in samples for text in sample.texts for piece in text.pieces)
        return Samples(samples, start, len(prompts), is_shaded=tokenizer is not None, is_masked=masked)

    def _data(self, folder: Path, model: Reference | None, start: int) -> Samples:
        import pyarrow.parquet as pq

        table = pq.read_table(folder / DATA)
        rows = table.slice(start, A_PAGE).to_pylist()
        tokenizer = self._of_model(model) if model and {"input_ids", "loss_mask"} <= set(table.column_names) else None
        samples = [replace(_of_row(row, tokenizer), images=list(row.get(IMAGES) or ())[:MOST_IMAGES]) for row in rows]
        return Samples(samples, start, table.num_rows, is_masked=tokenizer is not None)

    def _of_model(self, model: Reference) -> Tokenizer | None:
        """The tokenizer of a model; None if it cannot be read without the model's own code."""
        try:
            return self._tokenizer(model)
        except Exception:  # of any type, from the Rust library, too: texts are shown as they are
            return None

    def _read_tokenizer(self, model: Reference) -> Tokenizer:
        from tokenizers import Tokenizer

        store = self.snapshot.store
        entry = next(entry for entry in self.snapshot.manifest(model).files if entry.path == TOKENIZER)
        with store.workspace.scratch() as scratch:
            store.blobs.get(model.short, entry, scratch / TOKENIZER)
            return Tokenizer.from_file(str(scratch / TOKENIZER))


def _scores_in(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """The scores of an artifact by the numbers of prompt and sample."""
    import pyarrow.parquet as pq

    return {(row["prompt"], row["sample"]): row for row in pq.read_table(folder / SCORES).to_pylist()}


def _of_row(row: dict[str, Any], tokenizer: Tokenizer | None) -> Sample:
    """A row of a data set, of whatever kind."""
    if "chosen" in row:
        texts = [Text([Piece(str(row[name]))], look=name) for name in ("chosen", "rejected")]
        return Sample(str(row["prompt"]), texts, _fields(row, "prompt", "chosen", "rejected"))
    if row.get(IMAGES):  # whose tokens, hundreds of one kind, the text shows as one
        prompt = str(row.get("prompt") or "")
        return Sample(
            prompt, [Text([Piece(str(row["text"]))])] if "text" in row else [], _fields(row, "prompt", "text")
        )
    if tokenizer is not None:
        looks = ["" if counts else MASKED for counts in row["loss_mask"]]
        return Sample("", [Text(_merged(tokenizer, row["input_ids"], looks))], _fields(row, "text"))
    return Sample("", [], _fields(row))


def _fields(row: Mapping[str, Any], *left_out: str) -> dict[str, str]:
    """The texts and numbers of a row, without its token ids."""
    return {
        name: text_of(value)
        for name, value in row.items()
        if name not in (*left_out, *HIDDEN) and value is not None and not isinstance(value, list)
    }


def _notes(row: Mapping[str, Any]) -> str:
    names = ("reward", "verifier", "finish_reason")
    return " · ".join(f"{name.replace('_', ' ')} {text_of(row[name])}" for name in names if row.get(name) is not None)


def _shaded(
    tokenizer: Tokenizer | None,
    ids: Sequence[int],
    logps: Sequence[float | None] | None,
    mask: Sequence[bool] | None,
    text: str,
) -> list[Piece]:
    """A completion whose tokens are shaded by their probability; as it is, without a tokenizer."""
    if tokenizer is None or not logps:
        return [Piece(text)]
    looks = []
    for logp, trained in zip_longest(logps, mask or (), fillvalue=True):
        shade = next((look for highest, look in SHADES if logp is not None and logp < highest), "")
        looks.append(shade if trained else MASKED)
    return _merged(tokenizer, ids, looks, [None if logp is None else f"{logp:.2f}" for logp in logps])


def _merged(
    tokenizer: Tokenizer, ids: Sequence[int], looks: Sequence[str], titles: Sequence[str | None] | None = None
) -> list[Piece]:
    """Tokens in the order of the text, without a border between neighbours that look alike; shaded ones have a title."""
    pieces: list[Piece] = []
    for text, place in _texts(tokenizer, ids[:MOST_TOKENS]):
        look = looks[place] if place < len(looks) else ""
        title = (titles[place] or "") if titles and look.startswith("p") else ""
        if pieces and pieces[-1].look == look and not title:
            pieces[-1] = Piece(pieces[-1].text + text, look)
        else:
            pieces.append(Piece(text, look, title))
    if len(ids) > MOST_TOKENS:
        pieces.append(Piece(f" … ({len(ids) - MOST_TOKENS} tokens more)", "soft"))
    return pieces


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[str, int]]:
    """The text of each token with its place. Tokens that are parts of one character are together, at the place of the last.

    A token's text depends on the one before it: tokenizers drop the space in front of a first word.
    """
    texts = []
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(list(ids[before:start]), skip_special_tokens=False)
        text = tokenizer.decode(list(ids[before:end]), skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            continue
        texts.append((text[len(known) :], end - 1))
        before, start = start, end
    return texts
