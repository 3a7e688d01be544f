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
from alignment_core.errors import UserError
from alignment_core.init import models, reward_functions, rows, text
from alignment_core.init.base import Profile, loaded
from alignment_core.init.gates import promotion
from alignment_core.init.guess import ColumnMapping, check_columns, columns_of, guess_columns, unreadable
from alignment_core.init.held_out import hold_out, in_folder
from alignment_core.init.lengths import Lengths, measure
from alignment_core.init.machine import Machine, this_machine
from alignment_core.init.prompts import prompt_template
from alignment_core.init.text import Commented
from alignment_core.init.verifying import labels, verifier_of
from alignment_core.recipes import methods
from alignment_core.recipes.methods import Init
from alignment_core.recipes.paths import file_of, is_address

SCRATCH_SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
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
    columns: list[tuple[str, str, Any]]
    """Column, role ("" for an unused column) and the first row's value."""
    rows: rows.Rows
    model: models.Model
    lengths: Lengths
    held_out: list[dict[str, Any]]
    """Rows for :func:`alignment_core.init.held_out.held_out_file`, if the recipe names it."""
    warnings: list[str]
    problems: list[str]
    """Problems in rows that `align check` does not see, and that would end a run."""


def draft(
    request: InitRequest, store: Store, progress: Callable[[str], None], machine: Machine | None = None
) -> InitResult:
    """Draft a recipe. ``progress`` receives a sentence before each slow step.

    Raises UserError for rows, columns or a model that do not exist, or that do not suit the method.
    """
    refuse_literals({"--data": request.data, "--eval-data": request.eval_data, "--model": request.model})
    reward_functions.check(request.rewards)
    progress(f"reading {request.data}")
    data = rows.find(request.data)
    if request.columns:
        check_columns(data.name, data.first, request.columns)
    method, start, mapping = choose_method(request, data)
    verifier, label = _verification(mapping, data.first, request.columns)
    for role, column in request.columns.items():
        if mapping.columns.get(role) != column and not (role == "label" and label == column):
            raise UserError(
                f"--column {role}={column}: {method} does not read these rows with it; --method NAME says why"
            )
    template, notes = prompt_template(mapping, data.first)
    progress("looking at the model")
    model = models.choose(request.model, store)
    progress("measuring the rows")
    lengths = measure(data.first, mapping, model, start.settings, template)
    folder = request.output.absolute().parent
    kept = reward_functions.columns_for(data.first, mapping) if request.rewards else []
    kept_columns = {"keep_columns": kept} if kept else {}
    fields = {**mapping.source_fields(data.first[0]), **kept_columns}
    held_out = hold_out(request.eval_data, request.output, data, mapping, label, start.evaluates)
    profile = Profile(
        name=_name(data.name, method),
        rows=data,
        mapping=mapping,
        sources=[{**in_folder(source, folder), **fields} for source in data.sources],
        test_sources=[{**source, **kept_columns} for source in held_out.sources],
        prompts=[{**source, **kept_columns} for source in held_out.prompts],
        model=_in_recipe(model, lengths, folder),
        machine=machine or this_machine(),
        lengths=lengths,
        verifier=verifier,
        test_rows=held_out.test_rows,
        rewards=[reward_functions.written(name, folder) for name in request.rewards],
    )
    sections = start.sections(profile)
    why = start.why
    if request.method is not None or request.rewards:
        why = f"you {'gave rewards' if request.rewards else 'asked for it'}; it takes {kinds.load(mapping.kind).gives}"
    head = (
        f"{method} on {data.name}, written by `align init`: {why}. Edit it: `align fields {next(iter(sections))}` lists the "
        "fields of a section, `align check` finds mistakes."
    )
    content = _content(profile, method, start, _with_template(sections, template) if template else sections)
    return InitResult(
        method=method,
        why=why,
        text=text.written(content, head),
        recipe=text.plain(content),
        columns=_columns(data, mapping, label, template, kept),
        rows=data,
        model=profile.model,
        lengths=lengths,
        held_out=held_out.rows,
        warnings=[*data.notes, *notes, *lengths.warnings, *_warnings(profile, start)],
        problems=_labels_without_answer(profile),
    )


def choose_method(request: InitRequest, data: rows.Rows) -> tuple[str, Init, ColumnMapping]:
    """The requested method, or the first that suits the rows, and the mapping of their columns."""
    if request.method is None and not request.rewards:
        ranked = sorted((start.rank, name) for name, start in loaded().items() if start.rank is not None)
        for _, name in ranked:
            start = loaded()[name]
            for kind in start.kinds:
                mapping = guess_columns(data.first, kind, start.formats, request.columns)
                if mapping is not None and start.fits(data.first, mapping):
                    return name, start, mapping
        raise unreadable(data.name, data.first, data.problems)
    name = _method_name(request.method or "rl")
    if request.rewards and name != "rl":
        raise UserError("--reward is for --method rl: leave one of them out, or write `rewards` into the recipe")
    start = loaded()[name]
    for kind in start.kinds:
        mapping = guess_columns(data.first, kind, (), request.columns)
        if mapping is not None:
            return name, start, mapping
    raise unreadable(data.name, data.first, data.problems, kinds.load(start.kinds[0]))


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
) -> tuple[str | None, str | None]:
    """The verifier of answers, and the label column of demonstrations whose answers can be verified."""
    if mapping.kind == "prompts" and "label" in mapping.columns:
        return verifier_of(labels(first, mapping.columns)), None
    if mapping.kind != "demonstrations":
        return None, None
    prompt = {role: column for role, column in mapping.columns.items() if role in ("prompt", "messages", "tools")}
    as_prompts = guess_columns(first, "prompts", ("prompts", "messages"), {**prompt, **given})
    column = as_prompts.columns.get("label") if as_prompts else None
    if column is None:
        return None, None
    texts = labels(first, {"label": column})
    verifier = verifier_of(texts)
    if verifier == "math" and column not in mapping.columns.values():
        role = "messages" if "messages" in mapping.columns else "completion"
        answers = [str(Fields(row, mapping.columns).value(role)) for row in first[: len(texts)]]
        shown = [label.strip() in answer for label, answer in zip(texts, answers, strict=True)]
        if len(set(texts)) <= 2 or sum(shown) < SHOWN_SHARE * len(shown):  # a rating
            return None, None
    return verifier, column if verifier else None


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
    if profile.model.is_scratch:
        content["resources"] = {"zero_stage": Commented(0, "so small a model has nothing to share between ranks")}
    return content


def _with_template(value: Any, template: str) -> Any:
    """Add the template to every data set."""
    if isinstance(value, Commented):
        return replace(value, value=_with_template(value.value, template))
    if not isinstance(value, dict):
        return value
    inner = {name: _with_template(item, template) for name, item in value.items()}
    return {**inner, "prompt_template": Commented(template, "the further column")} if "sources" in inner else inner


def _columns(
    data: rows.Rows, mapping: ColumnMapping, label: str | None, template: str | None, kept: Sequence[str]
) -> list[tuple[str, str, Any]]:
    """The columns with their roles, unused ones last."""
    roles: dict[str, list[str]] = {}
    for role, column in mapping.columns.items():
        roles.setdefault(column, []).append(role)
    if label:
        roles.setdefault(label, []).append("label")
    if template:
        roles[template.rpartition("{")[2].rstrip("}")] = ["in the prompt"]
    for column in kept:
        roles.setdefault(column, []).append("for rewards")
    first = data.first[0]
    if mapping.columns.get("messages") == "conversations" and "system" in first:  # ShareGPT has it beside the messages
        roles["system"] = ["system"]
    top_level = {column.partition(".")[0] for column in roles}
    unused = [column for column in columns_of(data.first) if column not in top_level]
    used = [
        (column, ", ".join(names), Fields(first, {"prompt": column}).value("prompt")) for column, names in roles.items()
    ]
    return [*used, *((column, "", first.get(column)) for column in unused)]


def _warnings(profile: Profile, start: Init) -> list[str]:
    warnings = []
    if unreadable_rows := profile.rows.problems:
        warnings.append(f"{len(unreadable_rows)} of the first rows cannot be read: {unreadable_rows[0]}")
    if profile.lengths.problem and not profile.model.problem:
        warnings.append(f"the rows were not measured: {profile.lengths.problem}")
    if not start.evaluates or profile.prompts or profile.mapping.kind == "documents":
        return warnings
    if profile.test_sources or profile.test_rows:
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
