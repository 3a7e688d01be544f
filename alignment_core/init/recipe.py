"""A first recipe for the user's rows and model: the guesses, the reasons for them, and the text to edit."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Store
from alignment_core.credentials import refuse_literals
from alignment_core.data import kinds
from alignment_core.data.fields import Fields
from alignment_core.data.pinned_images import columns_of_images
from alignment_core.errors import DataError, UserError
from alignment_core.init import models, rows, text
from alignment_core.init.base import Profile, loaded
from alignment_core.init.guess import ColumnMapping, check_columns, columns_of, guess_columns, unreadable
from alignment_core.init.held_out import hold_out, in_folder
from alignment_core.init.images import have_images
from alignment_core.init.lengths import Lengths, measure
from alignment_core.init.machine import this_machine
from alignment_core.init.prompts import with_further_column
from alignment_core.init.sections import memory_fields, memory_problem, promotion
from alignment_core.init.text import Commented
from alignment_core.init.verifying import labels, verifier_of
from alignment_core.recipes import methods
from alignment_core.recipes.methods import Init
from alignment_core.recipes.paths import file_of, is_address
from alignment_core.recipes.sections.data import TAKEN
from alignment_core.user_code.functions import function_content

SCRATCH_SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
PROMPT_ROLES = ("prompt", "messages", "tools")
"""Roles whose columns reward functions get anyway."""
SHOWN_SHARE = 0.8
"""Share of demonstrations whose text must contain the label, for the label to be a right answer and no rating."""


@dataclass(frozen=True)
class InitRequest:
    """The options of `align init`."""

    data: str
    output: Path
    model: str | None = None
    method: str | None = None
    eval_data: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    rewards: Sequence[str] = ()
    """Names of reward functions, for reinforcement learning."""


@dataclass(frozen=True)
class InitResult:
    """A recipe, and the guesses in it."""

    method: str
    why: str
    text: str
    recipe: dict[str, Any]
    profile: Profile
    """The rows, the model and their measures, by which the recipe was written."""
    columns: list[tuple[str, str, Any]]
    """Column, role ("" for an unused column) and the first row's value."""
    warnings: list[str]
    problems: list[str]
    """Problems in rows that `align check` does not see, and that would end a run."""


def draft(request: InitRequest, store: Store, progress: Callable[[str], None]) -> InitResult:
    """Draft a recipe. ``progress`` receives a sentence before each slow step.

    Raises UserError for rows, columns or a model that do not exist, or that do not suit the method.
    """
    refuse_literals({"--data": request.data, "--eval-data": request.eval_data, "--model": request.model})
    with rows.without_recipe_hints():
        for name in request.rewards:
            function_content(name, "--reward")  # raises UserError if there is none; the code is not executed
    progress(f"reading {request.data}")
    data = rows.find(request.data)
    if request.columns:
        check_columns(data, request.columns)
    plan = _choose(request, data, have_images(data.first, request.columns))
    progress("looking at the model")
    machine = this_machine()
    model = models.choose(request.model, store, machine.gpus, plan.mapping.images)
    if plan.mapping.images and model.reads_text_alone:
        plan = _as_text(request, data, model)
    method, start, mapping, verifier = plan.method, plan.start, plan.mapping, plan.verifier
    progress("measuring the rows")
    lengths = measure(data, mapping, model, start.settings)
    folder = request.output.absolute().parent
    fields = mapping.source_fields(data.first[0])
    profile = Profile(
        name=_name(data.name, method),
        rows=data,
        mapping=mapping,
        sources=[{**in_folder(source, folder), **fields} for source in data.sources],
        held_out=hold_out(request.eval_data, request.output, data, mapping, start.evaluates),
        model=_in_recipe(model, lengths, folder),
        machine=machine,
        lengths=lengths,
        verifier=verifier,
        rewards=[_code_in_folder(name, folder) for name in request.rewards],
    )
    why = start.why
    if request.method is not None or request.rewards:
        why = f"you {'gave rewards' if request.rewards else 'asked for it'}; it takes {kinds.load(mapping.kind).gives}"
    sections = start.sections(profile)
    head = (
        f"{method} on {data.name}, written by `align init`: {why}. Edit it: `align fields {next(iter(sections))}` lists the "
        "fields of a section, `align check` finds mistakes."
    )
    content = _content(profile, method, start, sections)
    return InitResult(
        method=method,
        why=why,
        text=text.written(content, head),
        recipe=text.plain(content),
        profile=profile,
        columns=_columns(data.first, mapping),
        warnings=[
            *data.notes,
            *plan.notes,
            *lengths.warnings,
            *_warnings(profile, start),
            *memory_problem(profile, sections),
        ],
        problems=_labels_without_answer(profile),
    )


@dataclass(frozen=True)
class _Choice:
    """A method for the rows, and the mapping of their columns."""

    method: str
    start: Init
    mapping: ColumnMapping
    verifier: str | None
    notes: list[str]


def _choose(request: InitRequest, data: rows.Rows, images: bool) -> _Choice:
    """The method and the mapping of columns, with those of ``images`` if rows have some."""
    method, start, mapping = choose_method(request, data, images)
    verifier, mapping = _verification(mapping, data.first, request.columns)
    for role, column in request.columns.items():
        if mapping.columns.get(role) != column and not (role == "label" and mapping.label == column):
            raise UserError(
                f"--column {role}={column}: {method} does not read these rows with it; --method NAME says why"
            )
    mapping, notes = with_further_column(mapping, data.first)
    if request.rewards:
        mapping = replace(mapping, kept=columns_for_rewards(data.first, mapping))
    return _Choice(method, start, mapping, verifier, notes)


def _as_text(request: InitRequest, data: rows.Rows, model: models.Model) -> _Choice:
    """How rows with images are read by a model of text. Raises UserError for images in messages."""
    another = f"name an image-text model with --model, such as {models.DEFAULT_WITH_IMAGES}"
    try:
        plan = _choose(request, data, images=False)
    except DataError:
        raise UserError(
            f"--model {model.name}: reads text alone, and messages of {data.name} have images: {another}"
        ) from None
    return replace(
        plan, notes=[*plan.notes, f"the images of rows are not read, because {model.name} reads none: {another}"]
    )


def choose_method(request: InitRequest, data: rows.Rows, images: bool = False) -> tuple[str, Init, ColumnMapping]:
    """The requested method, or the first that suits the rows, and the mapping of their columns, with ``images`` if wanted."""
    starts = loaded()
    if request.method is None and not request.rewards:
        named = None
        ranked = sorted((start.rank, name) for name, start in starts.items() if start.rank is not None)
        tried = [name for _, name in ranked]
    else:
        named = _method_name(request.method or "rl")
        tried = [named]
    if request.rewards and named != "rl":
        raise UserError("--reward is for --method rl: leave one of them out, or write `rewards` into the recipe")
    for name in tried:
        start = starts[name]
        for kind in start.kinds:
            mapping = guess_columns(data.first, kind, () if named else start.formats, request.columns, images)
            if mapping is not None and (named or start.fits(data.first, mapping)):
                return name, start, mapping
    raise unreadable(data, kinds.load(starts[named].kinds[0]) if named else None)


def _method_name(method: str) -> str:
    """The method with this name or alias. Raises UserError for one that cannot be started from rows alone."""
    by_alias = {alias: known.name for known in methods.loaded()[0] for alias in (known.name, *known.aliases)}
    name = by_alias.get(method, by_alias.get(method.replace("_", "-")))
    if name is None:
        near = difflib.get_close_matches(method, [*by_alias], n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(loaded())}"
        raise UserError(f"--method {method}: there is no such method; {hint}")
    start = loaded().get(name)
    if start is None:
        raise UserError(
            f"--method {method}: rows alone do not say enough for it: `align init --from {name}` copies a recipe"
        )
    if method in start.others:
        raise UserError(f"--method {method}: is {name} with other settings; {start.instead}")
    return name


def _verification(
    mapping: ColumnMapping, first: list[rows.Row], given: Mapping[str, str]
) -> tuple[str | None, ColumnMapping]:
    """The verifier of answers, and the mapping with the label column of demonstrations whose answers can be verified."""
    if mapping.kind == "prompts" and "label" in mapping.columns:
        return verifier_of(labels(first, mapping.columns)), mapping
    if mapping.kind != "demonstrations":
        return None, mapping
    prompt = {role: column for role, column in mapping.columns.items() if role in ("prompt", "messages", "tools")}
    as_prompts = guess_columns(first, "prompts", ("prompts", "messages"), {**prompt, **given}, mapping.images)
    column = as_prompts.columns.get("label") if as_prompts else None
    if column is None:
        return None, mapping
    texts = labels(first, {"label": column})
    verifier = verifier_of(texts)
    if verifier == "math" and column not in mapping.columns.values():
        role = "messages" if "messages" in mapping.columns else "completion"
        answers = [str(Fields(row, mapping.columns).value(role)) for row in first[: len(texts)]]
        shown = [label.strip() in answer for label, answer in zip(texts, answers, strict=True)]
        if len(set(texts)) <= 2 or sum(shown) < SHOWN_SHARE * len(shown):  # a rating
            return None, mapping
    return verifier, replace(mapping, label=column) if verifier else mapping


def columns_for_rewards(first: Sequence[rows.Row], mapping: ColumnMapping) -> list[str]:
    """Columns to keep for reward functions: all that every row has, without those that functions get anyway."""
    prompt = {mapping.columns[role].partition(".")[0] for role in PROMPT_ROLES if role in mapping.columns}
    free = [column for column in columns_of(first) if column not in TAKEN | prompt]
    return [column for column in free if all(column in row for row in first)]


def _code_in_folder(name: str, folder: Path) -> str:
    """A reward function as a recipe in ``folder`` names it."""
    file, colon, function = name.rpartition(":")
    return f"{models.relative(file, folder)}{colon}{function}" if file.endswith(".py") else name


def _in_recipe(model: models.Model, lengths: Lengths, folder: Path) -> models.Model:
    """The model as a recipe in ``folder`` names it; a new one gets a context that takes the rows."""
    if model.is_scratch:
        fitting = (context for context in (256, 512, 1024) if context >= (lengths.longest or 0) + 64)
        return replace(model, context=next(fitting, 2048))
    if model.tokenizer is not None and model.tokenizer.folder and Path(model.name).expanduser().is_dir():
        return replace(model, name=models.written_as_path(models.relative(model.name, folder)))
    return model


def _name(data: str, method: str) -> str:
    """A name for the recipe and its runs."""
    path = Path(file_of(data) if is_address(data) else data).expanduser()
    stem = path.resolve().name if path.is_dir() else re.sub(r"\.(jsonl|json|csv|parquet|arrow|txt)$", "", path.name)
    plain = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return f"{plain}-{method}" if plain else method


def _content(profile: Profile, method: str, start: Init, sections: dict[str, Any]) -> dict[str, Any]:
    """The sections of the recipe, with comments."""
    model = Commented(profile.model.name, "a Hub name, a folder, or a tag of the store")
    if profile.model.is_scratch:
        shape = {"scratch": {**SCRATCH_SHAPE, "max_position_embeddings": profile.model.context}}
        model = Commented(
            shape, "new and tiny; for a real run write `model: NAME`: a Hub name, a folder or a tag of the store"
        )
    content = {"method": method, "name": profile.name, "seed": 0, "model": model, **sections}
    if start.promotes:
        content["promotion"] = promotion(f"policy/{profile.name}", method, sections)
    if memory := memory_fields(profile, sections):
        content["resources"] = memory
    if profile.model.is_scratch:
        content["resources"] = {"zero_stage": Commented(0, "so small a model has nothing to share between ranks")}
    return content


def _columns(first: Sequence[rows.Row], mapping: ColumnMapping) -> list[tuple[str, str, Any]]:
    """The columns with their roles, unused ones last."""
    used = [*mapping.columns.items()]
    used += [("label", mapping.label)] if mapping.label else []
    used += [("in the prompt", mapping.further)] if mapping.further else []
    used += [
        ("images", column) for column in columns_of_images(mapping.columns) if mapping.images and column in first[0]
    ]
    used += [("for rewards", column) for column in mapping.kept]
    # ShareGPT has it beside the messages
    if mapping.columns.get("messages") == "conversations" and "system" in first[0]:
        used.append(("system", "system"))
    roles: dict[str, list[str]] = {}
    for role, column in used:
        roles.setdefault(column, []).append(role)
    top_level = {column.partition(".")[0] for column in roles}
    unused = [column for column in columns_of(first) if column not in top_level]
    return [
        *(
            (column, ", ".join(names), Fields(first[0], {"prompt": column}).value("prompt"))
            for column, names in roles.items()
        ),
        *((column, "", first[0].get(column)) for column in unused),
    ]


def _warnings(profile: Profile, start: Init) -> list[str]:
    warnings = []
    if profile.machine.problem:
        warnings.append(
            f"nvidia-smi fails, and the recipe is for {profile.machine.words}: {profile.machine.problem}; `align doctor` "
            "checks the machine"
        )
    if unreadable_rows := profile.rows.problems:
        warnings.append(f"{len(unreadable_rows)} of the first rows cannot be read: {unreadable_rows[0]}")
    if profile.lengths.problem and not profile.model.problem:
        warnings.append(f"the rows were not measured: {profile.lengths.problem}")
    held_out = profile.held_out
    if not start.evaluates or held_out.prompts or profile.mapping.kind == "documents":
        return warnings
    if held_out.not_copied:
        warnings.append(
            "the policy is not evaluated, as rows with images in several folders are not copied: name rows with --eval-data"
        )
    elif held_out.sources or held_out.test_rows:
        warnings.append(
            "the policy is not evaluated, as prompts would take the column `label` for a right answer: rename it"
        )
    else:
        count = profile.rows.count_in_words
        warnings.append(
            f"nothing is held out of {count}, so that nothing is evaluated: name other rows with --eval-data"
        )
    return warnings


def _labels_without_answer(profile: Profile) -> list[str]:
    """A sentence if some labels are no answers that the verifier understands: a run ends at the first of them."""
    column = profile.mapping.columns.get("label")
    if profile.mapping.kind != "prompts" or profile.verifier is None or column is None:
        return []
    texts = labels(profile.rows.first, profile.mapping.columns, len(profile.rows.first))
    without = [number for number, label in enumerate(texts, 1) if verifier_of([label]) != profile.verifier]
    if not without:
        return []
    return [
        f"{len(without)} of the first {len(texts):,} rows that can be read have no answer in `{column}` that the verifier "
        f"{profile.verifier} understands, the first is number {without[0]}: a run would end there; correct or remove them"
    ]
