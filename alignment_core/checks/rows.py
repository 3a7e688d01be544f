"""Checks of the first rows of data sets, in a process with tokenizers and without torch: seconds instead of a stage.

``python -m alignment_core.checks.rows`` reads a list of :class:`Question` as JSON and writes a line of JSON for each, an
:class:`Answer`; before them an empty line, once all rows are parsed and none is malformed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from alignment_core.data import kinds, statistics
from alignment_core.data.build import examples, kept_rows
from alignment_core.data.context import check_context
from alignment_core.data.image_reader import ImageReader
from alignment_core.data.image_tokens import tokens_of_images
from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.data.limits import Limits
from alignment_core.data.messages import tools_of
from alignment_core.data.origins import origin_of
from alignment_core.data.pin import PinnedSource
from alignment_core.data.template import Renderer
from alignment_core.environments.tool_calls import Call, answers, check_format
from alignment_core.errors import UserError
from alignment_core.imports import uncollected
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.processes import inherited
from alignment_core.recipes import DataConfig
from alignment_core.stages.dataset import DatasetConfig

if TYPE_CHECKING:
    from alignment_core.models.images import ImageProcessor

READ = 20_000
"""Rows of a source that are parsed."""
RENDERED = 1_000
"""Rows of a source that a tokenizer sees."""
WITH_IMAGES = 64
"""Images of a data set that are read and rendered: each takes as long as hundreds of rows of text."""
MADE = 100
"""Rows that a built-in task or a library makes for the check: few, because they are alike."""
SAMPLES = 4
"""Rows that reward functions are called on."""
MAIN = "import gc, sys; gc.disable(); sys.path.insert(0, {root!r}); from {module} import main; main()"
"""The reader's process, without garbage collection, which would take a quarter of the imports' time."""
SAID = "This is the result."
"""An answer to a turn of the policy."""
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""Files of a repository on the Hub that its processor needs."""
STAND_IN = "This is not an answer."
"""The completion for a row without a label."""


class TokenizerSource(BaseModel):
    """The place of a tokenizer: a folder, or a Hub name with its commit; neither for that of models from scratch."""

    folder: str | None = None
    hub: str | None = None
    commit: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    eos_token: str | None = None
    trust_remote_code: bool = False


class Question(BaseModel):
    """A data set to check."""

    label: str
    dataset: DatasetConfig
    tokenizer: TokenizerSource
    context: int | None = None
    """The longest sequence that the model takes."""
    seed: int = 0
    role: str | None = None
    """Role of the messages that answer a policy's turns, if these prompts are sampled in an environment."""
    reads_images: bool = False
    """Whether the model reads images."""
    reads_calls: bool = False
    """Whether that environment runs tool calls."""
    rows: bool = True
    """Whether to check the rows; otherwise only how the chat template renders such an answer."""


class Answer(BaseModel):
    """The result of a check."""

    label: str
    problem: str | None = None
    """A sentence if the rows cannot be used."""
    unseen: str | None = None
    """The reason if the rows were not checked."""
    read: int = 0
    dropped: dict[str, int] = {}
    shortened: int = 0
    trained: int = 0
    """Rows of the table, of which a source's row may give several, without those of sources that are held out."""
    whole: bool = False
    """Whether all rows were read."""
    has_images: bool = False
    """Whether any row that was read has an image."""
    longest: int = 0
    """Tokens of the longest prompt, for a data set of prompts."""
    thinks: bool = False
    """Whether the chat template knows of thoughts before an answer."""
    lengths: list[int] = []
    """Tokens of each prompt, ascending."""
    sequences: list[tuple[int, int | None]] = []
    """Tokens of each sequence before its targets, and of the targets, which prompts do not have."""
    warnings: list[str] = []
    """Sentences about ignored files and fields."""
    used: bool = False
    """Whether the data set will have all rows that were read: none is held out, and no mixture leaves any out."""
    samples: list[dict[str, Any]] = []
    """Prompts as reward functions see them, each with a completion: its label, if it has one."""

    def certain(self, count: int | None) -> int:
        """Least number of tokens of the longest of any ``count`` prompts of the data set (None: of all); 0 if unknown.

        Of k prompts among n, the longest has at least as many tokens as the k-th shortest of the n.
        """
        if not self.lengths or not (self.whole or (count is None and self.used)):
            return 0
        if not self.used:
            return self.lengths[0]
        return self.lengths[-1 if count is None else min(count, len(self.lengths)) - 1]


def ask(questions: Sequence[Question], on_parsed: Callable[[], None] = lambda: None) -> Generator[Answer]:
    """The answers, in order, as they come. If the process ends early, the rest is not checked.

    ``on_parsed`` is called once all rows are parsed and none is malformed, while the reader loads the tokenizer.
    """
    if not questions:
        on_parsed()
        return
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN.format(root=str(root), module=__name__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=inherited(),
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([question.model_dump(mode="json") for question in questions]))
        process.stdin.close()
        for question in questions:
            line = process.stdout.readline()
            if line == "\n":
                on_parsed()
                line = process.stdout.readline()
            yield Answer.model_validate_json(line) if line else Answer(label=question.label, unseen="its reader ended")
    finally:
        process.kill()  # it writes nothing, and a tokenizer or a download may keep it busy for minutes
        process.wait()


def main() -> None:
    """Entry point."""
    questions = [Question.model_validate(content) for content in json.load(sys.stdin)]
    if not any(_may_want_torch(question) for question in questions):
        sys.modules["torch"] = None  # type: ignore[assignment] # tokenizers do not need it, and its import takes seconds
    answers = sys.stdout
    sys.stdout = sys.stderr  # a library that prints must not spoil the answers
    for answer in answers_to(questions, on_parsed=lambda: print(file=answers, flush=True)):
        print(answer.model_dump_json(), file=answers, flush=True)


def _may_want_torch(question: Question) -> bool:
    """Whether code runs that may need it: that of a tokenizer, an image processor, or of `datasets` for data of the Hub."""
    others = any(origin_of(source.source).runs_others_code(source) for source in question.dataset.sources)
    return question.tokenizer.trust_remote_code or question.reads_images or others


def answers_to(questions: Sequence[Question], on_parsed: Callable[[], None] = lambda: None) -> Iterator[Answer]:
    """Check the rows of all data sets as they are in their sources; if these are valid, as a tokenizer renders them."""
    parsed = [_answer(question, _parse) for question in questions]
    if any(answer.problem for answer in parsed):  # reported without waiting for a tokenizer
        yield from parsed
        return
    on_parsed()
    for question in questions:
        yield _answer(question, _render)


def _answer(question: Question, look: Callable[[Question], dict[str, Any]]) -> Answer:
    try:
        return Answer(label=question.label, **look(question))
    except UserError as error:
        return Answer(label=question.label, problem=str(error))
    except Exception as error:  # no network, a tokenizer that needs torch: the stage itself will report this
        return Answer(label=question.label, unseen=f"{type(error).__name__}: {error}")


def _parse(question: Question) -> dict[str, Any]:
    if not question.rows:
        return {}
    config, pinned = question.dataset, [_first(source, READ) for source in question.dataset.sources]
    kind = kinds.load(config.kind)
    ledger = statistics.Ledger(pinned, config.data.max_bad_rows, kind)
    with _images_of(question) as reader:
        for number, source in enumerate(pinned):
            if source.files:
                for _ in examples(source, number, ledger, kind, question.seed, reader=reader):
                    if reader and reader.count >= WITH_IMAGES:
                        break
    _judge(ledger, config.data)
    return {"read": ledger.read.total(), "warnings": _notes(config.sources)}


@contextmanager
def _images_of(question: Question) -> Iterator[ImageReader | None]:
    """Reads images into a folder that is removed behind it; None for models of text."""
    if not (question.reads_images and question.rows):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="align-check-") as folder:
        yield ImageReader(Path(folder))


def _notes(sources: Sequence[PinnedSource]) -> list[str]:
    return list(dict.fromkeys(f"{source.name}: {note}" for source in sources for note in source.notes))


def _render(question: Question) -> dict[str, Any]:
    with _images_of(question) as reader:
        processor = _processor(question.tokenizer) if reader else None
        return _rendered(question, reader if processor else None, processor)


def _rendered(question: Question, reader: ImageReader | None, processor: ImageProcessor | None) -> dict[str, Any]:
    config, kind = question.dataset, kinds.load(question.dataset.kind)
    tokenizer = _tokenizer(question.tokenizer)
    renderer = Renderer(
        tokenizer, config.data.chat_template, images=tokens_of_images(processor, reader.folder if reader else None)
    )
    if question.role is not None:
        _check_answers(renderer, question.role)
    if not question.rows:
        return {}
    count = WITH_IMAGES if reader and _have_images(question, reader) else RENDERED
    pinned = [_first(source, count) for source in config.sources]
    ledger = statistics.Ledger(pinned, config.data.max_bad_rows, kind)
    limits = Limits(config.data, renderer, tokenizer.bos_token_id, config.settings)
    kept = list(kept_rows(pinned, limits, ledger, kind, question.seed, None, reader=reader))
    rows = [columns for _, columns in kept]
    _judge(ledger, config.data)
    warnings = [*_notes(config.sources), *statistics.not_read(ledger.unread + renderer.fields.unread)]
    if question.reads_calls and (tools := next(filter(None, map(tools_of, rows)), None)):
        check_format(renderer, tools)
    result: dict[str, Any] = {"read": ledger.read.total(), "dropped": dict(sum(ledger.dropped, Counter()))}
    result |= {"shortened": ledger.shortened.total(), "warnings": warnings}
    result["trained"] = sum(not pinned[row.source].source.held_out for row, _ in kept)
    result["thinks"] = "think>" in str(tokenizer.chat_template or "")
    whole = all(_to_its_end(source, pinned[n], ledger.read[n]) for n, source in enumerate(config.sources))
    if not rows:
        if whole:
            ledger.check_rows_left([0] * len(pinned), mixture=False)
        return result | {"unseen": f"the filters drop all of the first {result['read']} rows; later rows were not read"}
    drawn = config.data.mixing == "all_exhausted" or all(source.source.weight is None for source in pinned)
    if drawn:  # otherwise the mixture may never reach a row that is too long
        check_context([kind.sequences(row) for row in rows], question.context, lambda place: rows[place]["source"])
    result |= {"has_images": any(row.get(IMAGES) for row in rows)}
    result |= {"whole": whole, "sequences": [sequence for row in rows for sequence in kind.sequences(row)]}
    if not kind.policy_answers:
        return result
    lengths = sorted(len(row["prompt_ids"]) for row in rows)
    return result | {
        "longest": lengths[-1],
        "lengths": lengths,
        "used": drawn and not config.data.has_test_rows,
        "samples": [_sample(row) for row in rows[:SAMPLES]],
    }


def _have_images(question: Question, reader: ImageReader) -> bool:
    """Whether one of the first rows of the sources has an image."""
    config, kind = question.dataset, kinds.load(question.dataset.kind)
    first = [_first(source, 1) for source in config.sources]
    for number, source in enumerate(first):
        for _ in examples(source, number, statistics.Ledger(first, 1.0, kind), kind, question.seed, reader=reader):
            pass
    return reader.count > 0


def _check_answers(renderer: Renderer, role: str) -> None:
    """Raise UserError for a template that does not render the answer to a policy's turn, as an environment renders it."""
    shown = []
    try:
        for text in (SAID, f"{SAID} {SAID}"):
            messages = answers([text], [Call("f", {})], 1) if role == "tool" else [{"role": role, "content": text}]
            shown.append(renderer.encode_reply(messages, renderer.turn_end.token_id))
    except (UserError, ValueError) as error:
        raise UserError(
            f"rl.environment.role: a turn cannot be answered by a message of the role {role!r}: {error}"
        ) from None
    if shown[0] == shown[1]:
        raise UserError(f"rl.environment.role: the chat template does not show messages of the role {role!r}")


def _judge(ledger: statistics.Ledger, data: DataConfig) -> None:
    """Raise DataError for malformed rows. If the recipe allows a fraction of them, only the whole data set can show it."""
    if not data.max_bad_rows:
        ledger.check_bad_rows()


def _first(pinned: PinnedSource, rows: int) -> PinnedSource:
    """The source, limited to its first rows; ``rows`` of the recipe are then chosen among these."""
    source = pinned.source
    most = rows if source.path else MADE
    if origin_of(source).samples_rows:
        return pinned.model_copy(update={"first": most})
    return pinned.model_copy(update={"source": source.model_copy(update={"rows": min(source.rows or most, most)})})


def _to_its_end(source: PinnedSource, cut: PinnedSource, read: int) -> bool:
    """Whether the ``read`` rows of a source are all that the data set will have of it."""
    if cut.first is None:
        return read < (cut.source.rows or 0) or source.source.rows == cut.source.rows
    return read < min(cut.first, source.source.rows or cut.first)


def samples_of(dataset: Path) -> list[dict[str, Any]]:
    """The same for a data set in the store."""
    import pyarrow.parquet as pq

    file = dataset / "train.parquet"
    return [_sample(row) for row in pq.read_table(file).slice(0, SAMPLES).to_pylist()] if file.is_file() else []


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    ids = [int(token) for token in row["prompt_ids"]]
    return {
        "prompt_text": row["prompt"],
        "prompt_ids": ids,
        "completion_text": row["label"] or STAND_IN,
        "completion_ids": ids,  # any tokens
        **{name: row.get(name) for name in ("label", "task", "messages", "tools", "columns", "source")},
    }


def _tokenizer(source: TokenizerSource) -> Any:
    if source.folder is None and source.hub is None:
        from alignment_core.models.tokenizer import byte_tokenizer

        return _with_settings(byte_tokenizer(source.chat_template), source)
    with uncollected():
        import transformers  # noqa: F401

    trust = source.trust_remote_code
    place = {"revision": source.commit} if source.hub else {}
    tokenizer = load_tokenizer(source.folder or str(source.hub), trust, **place)
    if source.chat_template is not None:
        tokenizer.chat_template = source.chat_template
    return _with_settings(tokenizer, source)


def _processor(source: TokenizerSource) -> ImageProcessor | None:
    """The processor of a model's images; None if it has none."""
    from alignment_core.models.images import ImageProcessor

    folder = source.folder
    if source.hub is not None:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(source.hub, revision=source.commit, allow_patterns=list(BESIDE_WEIGHTS))
    return ImageProcessor.of(Path(folder), source.trust_remote_code) if folder else None


def _with_settings(tokenizer: Any, source: TokenizerSource) -> Any:
    """The tokenizer with the recipe's end of sequence and the arguments in its chat template, as the stage writes them. Raises
    UserError for one that no template reads, or that is no token."""
    from alignment_core.models.eos_token import check_in_vocabulary
    from alignment_core.models.template_kwargs import check_read, with_kwargs

    if source.eos_token is not None:
        check_in_vocabulary(tokenizer, source.eos_token)
        tokenizer.eos_token = source.eos_token
    if kwargs := source.chat_template_kwargs:
        own: Any = tokenizer.chat_template or {}
        several = own if isinstance(own, dict) else {"default": own}
        check_read([*several.values()], kwargs)
        shown = {name: with_kwargs(template, kwargs) for name, template in several.items()}
        tokenizer.chat_template = shown if isinstance(own, dict) else shown["default"]
    return tokenizer
