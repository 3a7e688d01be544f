"""From somebody's rows and model to a recipe: what was guessed, why, and the text to edit."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Store
from alignment_core.data import kinds
from alignment_core.data.fields import Fields
from alignment_core.errors import UserError
from alignment_core.init import models, reward_functions, rows, text
from alignment_core.init.base import Profile, Start, by_rank, loaded
from alignment_core.init.gates import promotion
from alignment_core.init.guess import ColumnMapping, check_given, columns_of, nothing_fits, reading
from alignment_core.init.lengths import Lengths, measure
from alignment_core.init.machine import Machine, this_machine
from alignment_core.init.names import VERDICTS, called
from alignment_core.init.prompts import further_turns, template_of
from alignment_core.init.sections import memory_warning
from alignment_core.init.verifying import labels, verifier_of
from alignment_core.recipes import methods

LEAST_APART = 20
"""Rows from which some are kept apart to measure on."""
MOST_APART = 200
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
"""Of a new tiny model."""
ACCEPTED = "accepted"
"""What held-out rows call a thumb up, as prompts would take a ``label`` for an answer."""
REWARDED = "rl"
"""The method that learns from reward functions."""
SHOWN = 0.8
"""Share of the demonstrations that have to show their answer."""
Ask = Callable[[str, Sequence[str]], str]
"""Asks a question with these answers, of which the first is the guess."""


@dataclass(frozen=True)
class InitRequest:
    """What somebody asked for; nothing of it is needed."""

    data: str
    output: Path
    model: str | None = None
    method: str | None = None
    eval_data: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    rewards: Sequence[str] = ()
    """Reward functions, by name, for reinforcement learning."""


@dataclass(frozen=True)
class InitResult:
    """A recipe, and all that is to be said of it."""

    method: str
    why: str
    text: str
    recipe: dict[str, Any]
    columns: list[tuple[str, str, Any]]
    """Column, role (nothing for one that is not used) and the first row's value."""
    rows: rows.Rows
    model: models.Model
    lengths: Lengths
    held_out: list[dict[str, Any]]
    """Rows for the file of those that are kept apart; none where there is no such file."""
    warnings: list[str]
    problems: list[str]
    """What the checks do not see, and a run would end on."""


def held_out_file(output: Path) -> Path:
    """Where rows that are kept apart are written."""
    return output.with_name(output.stem + rows.HELD_OUT)


def start(
    wish: InitRequest, store: Store, ask: Ask, told: Callable[[str], None], machine: Machine | None = None
) -> InitResult:
    """Find out what can be found out, and write it down. ``told`` hears of what takes a while.

    Raises UserError where rows, columns or model mean nothing, or lack what the method needs.
    """
    machine, warnings = machine or this_machine(), list[str]()
    reward_functions.check(wish.rewards)
    told(f"reading {wish.data}")
    found = rows.find(wish.data, keep_apart=wish.eval_data is None)
    if wish.columns:
        check_given(found.named, found.first, wish.columns)
    method, begin, chosen = method_for(wish, found)
    verifier, labelled = _labelled(chosen, found, wish.columns)
    for role, column in wish.columns.items():
        if chosen.columns.get(role) != column and not (role == "label" and labelled == column):
            raise UserError(
                f"--column {role}={column}: {method} does not read these rows with it; --method NAME says why"
            )
    chosen = _asked(chosen, labelled, ask, warnings)
    template = template_of(chosen, found, warnings)
    warnings += further_turns(chosen, found.first)
    folder = wish.output.absolute().parent
    told("looking at the model")
    model = models.choose(wish.model, store)
    told("measuring the rows")
    lengths = measure(found.first, chosen, model, begin.settings, template)
    if lengths.problem and not model.problem:
        warnings.append(f"the rows were not measured: {lengths.problem}")
    warnings += lengths.warnings
    model = _placed(model, lengths, folder)
    kept = reward_functions.columns_for(wish.rewards, found.first, chosen) if wish.rewards else []
    keeping = {"keep_columns": kept} if kept else {}
    sources = [{**one, **chosen.source_fields(found.first[0]), **keeping} for one in found.sources]
    tests, prompts, apart = _apart(wish, found, begin, chosen, sources, labelled)
    local = [_moved(one, folder) for one in sources]
    if not apart:
        tests, prompts = ([_moved(one, folder) for one in some] for some in (tests, prompts))
    tests, prompts = ([{**one, **keeping} for one in some] for some in (tests, prompts))
    facts = Profile(
        _name(found.named, method), found, chosen, local, tests, prompts, model, machine, lengths, verifier,
        test_rows=_test_rows(found, begin, chosen, sources, tests),
        rewards=[reward_functions.written(one, folder) for one in wish.rewards],
    )  # fmt: skip
    content = _content(facts, method, begin, template)
    warnings += _warnings(facts, begin)
    if wish.method is None and not begin.learns:
        warnings += _unread(found, chosen, template)
    why = begin.why
    if wish.method is not None or wish.rewards:
        why = f"you {'gave rewards' if wish.rewards else 'asked for it'}; it takes {kinds.load(chosen.kind).gives}"
    head = (
        f"{method} on {found.named}, written by `align init`: {why}. Edit what you like: `align fields "
        f"{next(iter(begin.sections(facts)))}` says what a section may hold, `align check` what is wrong."
    )
    return InitResult(
        method, why, text.written(content, head), text.plain(content), _columns(found, chosen, labelled, template, kept), found,
        model, lengths, apart, warnings, _unverified(facts),
    )  # fmt: skip


def method_for(wish: InitRequest, found: rows.Rows) -> tuple[str, Start, ColumnMapping]:
    """The method that was asked for, or the first that the rows speak for, and how it reads them."""
    if wish.method is not None or wish.rewards:
        name = _named(wish.method or REWARDED)
        if wish.rewards and name != REWARDED:
            raise UserError(
                f"--reward is for --method {REWARDED}: leave one of them out, or write `rewards` into the recipe"
            )
        start = loaded()[name]
        for kind in start.kinds:
            read = reading(found.first, kind, (), wish.columns)
            if read is not None:
                return name, start, read
        raise nothing_fits(found.named, found.first, kinds.load(start.kinds[0]), found.bad)
    for name, start in by_rank():
        for kind in start.kinds:
            read = reading(found.first, kind, start.formats, wish.columns)
            if read is not None and start.fits(found.first, read):
                return name, start, read
    raise nothing_fits(found.named, found.first, None, found.bad)


def _named(method: str) -> str:
    """The method that somebody calls so. Raises UserError for one that no rows say enough for."""
    meant = {alias: one.name for one in methods.loaded()[0] for alias in (one.name, *one.aliases)}
    name = meant.get(method, meant.get(method.replace("_", "-"), method))
    if name in loaded():
        if method in loaded()[name].others:
            raise UserError(f"--method {method}: rows speak for {name} with other settings; {loaded()[name].instead}")
        return name
    if name in methods.METHODS.names():
        raise UserError(
            f"--method {method}: rows alone do not say enough for it: `align init --from {name}` copies a recipe"
        )
    near = difflib.get_close_matches(method, [*meant], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(loaded())}"
    raise UserError(f"--method {method}: there is no such method; {hint}")


def _asked(chosen: ColumnMapping, labelled: str | None, ask: Ask, warnings: list[str]) -> ColumnMapping:
    """The same, once somebody said which of several likely columns is meant; the one with the right answers is not."""
    columns = dict(chosen.columns)
    for role, others in chosen.others.items():
        left = [one for one in others if one not in (*columns.values(), labelled)]
        if not left:
            continue
        columns[role] = ask(f"which column is the {role}?", [columns[role], *left])
        if columns[role] == chosen.columns[role]:
            warnings.append(f"`{role}` could also be {' or '.join(left)}: --column {role}={left[0]}")
    return replace(chosen, columns=columns)


def _labelled(chosen: ColumnMapping, found: rows.Rows, given: Mapping[str, str]) -> tuple[str | None, str | None]:
    """What verifies answers, and the column with the right ones, where held-out demonstrations have one."""
    if chosen.kind == "prompts":
        return verifier_of(labels(found.first, chosen.columns) if "label" in chosen.columns else []), None
    if chosen.kind != "demonstrations":
        return None, None
    as_prompts = reading(found.first, "prompts", ("prompts", "messages"), {**_shared(chosen), **given})
    column = as_prompts.columns.get("label") if as_prompts else None
    verifier = verifier_of(labels(found.first, {"label": column})) if column else None
    if verifier == "math" and column not in chosen.columns.values() and not _shown(found, chosen, str(column)):
        verifier = None
    return verifier, column if verifier else None


def _shown(found: rows.Rows, chosen: ColumnMapping, column: str) -> bool:
    """Whether a column holds the answers of the demonstrations, and no ratings: they are in their texts."""
    role = "messages" if "messages" in chosen.columns else "completion"
    some = list(zip(labels(found.first, {"label": column}), found.first, strict=False))
    shown = [label.strip() in str(Fields(row, chosen.columns).value(role)) for label, row in some]
    return len({label for label, _ in some}) > 2 and sum(shown) >= SHOWN * len(shown)


def _shared(chosen: ColumnMapping) -> dict[str, str]:
    return {role: column for role, column in chosen.columns.items() if role in ("prompt", "messages", "tools")}


def _placed(model: models.Model, lengths: Lengths, folder: Path) -> models.Model:
    """The model as the recipe in ``folder`` names it; a new one takes the rows that were measured."""
    if model.is_scratch:
        wanted, context = lengths.longest + 64, 256
        while context < min(wanted, 2048):
            context *= 2
        return replace(model, context=context)
    if model.tokenizer is not None and model.tokenizer.folder and Path(model.name).expanduser().is_dir():
        return replace(model, name=_written_path(models.relative(model.name, folder)))
    return model


def _written_path(path: str) -> str:
    return path if path.startswith((".", "/", "~")) else f"./{path}"


def _moved(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A source as the recipe in ``folder`` names it."""
    path = str(source["path"])
    return {**source, "path": models.relative(path, folder)} if Path(path).expanduser().exists() else source


def _apart(
    wish: InitRequest,
    found: rows.Rows,
    start: Start,
    chosen: ColumnMapping,
    sources: list[dict[str, Any]],
    labelled: str | None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Sources to measure on, the same as prompts, and rows that are kept apart of those to train on, for a file."""
    fields = chosen.source_fields(found.first[0])
    if wish.eval_data is not None:
        others = rows.find(wish.eval_data, keep_apart=False)
        if same := [one for one in others.files for file in found.files if one.samefile(file)]:
            raise UserError(f"--eval-data {wish.eval_data}: {same[0]} is among the rows to train on")
        check_given(others.named, others.first, fields.get("columns", {}))
        tests = [{**one, **fields} for one in others.sources]
        return tests, _as_prompts(tests, chosen, labelled, others.first[0]) if start.evaluates else [], []
    if found.tests:
        tests = [{**one, **fields} for one in found.tests]
        return tests, _as_prompts(tests, chosen, labelled, found.first[0]) if start.evaluates else [], []
    if not start.evaluates or found.count < LEAST_APART or chosen.kind == "documents":
        return [], [], []
    count = min(MOST_APART, max(4, found.count // 10))
    kept = rows.some_to_hold_out(sources, kinds.load(chosen.kind), chosen.format, count)
    if not kept:
        return [], [], []
    if _has_verdict(chosen, kept[0]):
        free = ACCEPTED
        while any(free in row for row in kept):
            free = f"{free}_"
        kept = [{free if name == "label" else name: value for name, value in row.items()} for row in kept]
        columns = {role: free if column == "label" else column for role, column in chosen.columns.items()}
        chosen = replace(chosen, columns=columns)
        fields = chosen.source_fields(kept[0])
    tests = [{"path": held_out_file(wish.output).name, **fields}]  # beside the recipe
    return tests, _as_prompts(tests, chosen, labelled, kept[0]), kept


def _test_rows(
    found: rows.Rows, start: Start, chosen: ColumnMapping, sources: list[dict[str, Any]], tests: list[dict[str, Any]]
) -> int:
    """How many rows to hold out where they get no file of their own: none where there are too few, or too few prompts."""
    if tests or found.count < LEAST_APART or (start.evaluates and chosen.kind != "documents"):
        return 0
    count = min(MOST_APART, found.count // 10)
    kind = kinds.load(chosen.kind)
    return count if chosen.kind == "documents" or rows.some_to_hold_out(sources, kind, chosen.format, count) else 0


def _unread(found: rows.Rows, chosen: ColumnMapping, template: str | None) -> list[str]:
    """What to say where rows are read as mere prompts or texts, and have more."""
    used = {column.partition(".")[0] for column in chosen.columns.values()}
    left = [one for one in columns_of(found.first) if one not in used and f"{{{one}}}" not in (template or "")]
    left = [one for one in left if not re.search(r"(^|_)(id|index|uuid|url|source|split)$", one.lower())]
    if not left:
        return []
    names = ", ".join(f"`{one}`" for one in left[:5])
    return [
        f"nothing is learned from {names}: if it should be, --method NAME (sft, dpo, kto, rl, …) says what is missing"
    ]


def _unverified(facts: Profile) -> list[str]:
    """Rows to learn from by a verifier that have no answer which it understands: a run ends at them."""
    if facts.reading.kind != "prompts" or facts.verifier is None or "label" not in facts.reading.columns:
        return []
    found = labels(facts.rows.first, facts.reading.columns, len(facts.rows.first))
    unfit = [number for number, label in enumerate(found, 1) if verifier_of([label]) != facts.verifier]
    if not unfit:
        return []
    column = facts.reading.columns["label"]
    return [
        f"{len(unfit)} of the first {len(found):,} rows that can be read have no answer in `{column}` that the verifier "
        f"{facts.verifier} understands, the first is number {unfit[0]}: a run would end there; mend them, or leave them out"
    ]


def _has_verdict(chosen: ColumnMapping, first: Mapping[str, Any]) -> bool:
    """Whether prompts would take a verdict, such as a thumb, for the right answer."""
    if "label" not in first or (chosen.kind == "prompts" and "label" in chosen.columns):
        return False
    try:
        Fields(first, {}).label()
    except ValueError:
        return True
    return chosen.columns.get("label") == "label"


def _as_prompts(
    tests: list[dict[str, Any]], chosen: ColumnMapping, labelled: str | None, first: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The same rows as prompts to answer; none where their thumbs would be taken for answers."""
    if _has_verdict(chosen, first):
        return []
    asked = {
        role: column for role, column in chosen.columns.items() if role in ("prompt", "messages", "label", "tools")
    }
    if chosen.kind in ("preferences", "unpaired"):
        asked = {
            role: column for role, column in chosen.columns.items() if role in ("prompt", "chosen", "rejected", "tools")
        }
        if "prompt" in asked and chosen.kind == "unpaired":
            asked = {role: column for role, column in asked.items() if role in ("prompt", "tools")}
    if labelled:
        asked["label"] = labelled
    columns = {role: column for role, column in asked.items() if role != column}
    return [
        {
            **{name: value for name, value in one.items() if name != "columns"},
            **({"columns": columns} if columns else {}),
        }
        for one in tests
    ]


def _name(named: str, method: str) -> str:
    """The name of a recipe and its runs."""
    path = Path(named).expanduser()
    stem = (
        path.resolve().name if path.is_dir() else re.sub(r"\.(jsonl|json|csv|parquet|arrow|txt)$", "", Path(named).name)
    )
    plain = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return f"{plain}-{method}" if plain else method


def _content(facts: Profile, method: str, start: Start, template: str | None) -> dict[str, Any]:
    said: Any = {"scratch": {**SHAPE, "max_position_embeddings": facts.model.context}}
    comment = "a Hub name, a folder, or a tag of the store"
    if facts.model.is_scratch:
        comment = "new and tiny, to try this out; put `model: NAME` here, a Hub name, a folder or a tag of the store"
    else:
        said = facts.model.name
    sections = start.sections(facts)
    if template:
        sections = _with_template(sections, template)
    content = {
        "method": method,
        "name": facts.name,
        "seed": 0,
        "model": text.Said(said, comment),
        **sections,
    }
    if start.promotes:
        content["promotion"] = promotion(f"policy/{facts.name}", method, sections)
    if facts.model.is_scratch:
        content["resources"] = {"zero_stage": text.Said(0, "so small a model has nothing to share between ranks")}
    return content


def _with_template(value: Any, template: str) -> Any:
    """The template in every data set."""
    if isinstance(value, text.Said):
        return replace(value, value=_with_template(value.value, template))
    if not isinstance(value, dict):
        return value
    inner = {name: _with_template(one, template) for name, one in value.items()}
    return {**inner, "prompt_template": text.Said(template, "the further column")} if "sources" in inner else inner


def _columns(
    found: rows.Rows, chosen: ColumnMapping, labelled: str | None, template: str | None, kept: Sequence[str]
) -> list[tuple[str, str, Any]]:
    roles: dict[str, list[str]] = {}
    for role, column in chosen.columns.items():
        roles.setdefault(column, []).append(role)
    if labelled:
        roles.setdefault(labelled, []).append("label")
    if template:
        roles[template.rpartition("{")[2].rstrip("}")] = ["in the prompt"]
    for column in kept:
        roles.setdefault(column, []).append("for rewards")
    first = found.first[0]
    if chosen.columns.get("messages") == "conversations" and "system" in first:  # ShareGPT's, read with them
        roles.setdefault("system", []).append("system")
    used = {column.partition(".")[0] for column in roles}
    listed = [
        (column, ", ".join(names), Fields(first, {"prompt": column}).value("prompt")) for column, names in roles.items()
    ]
    return [*listed, *((column, "", first.get(column)) for column in columns_of(found.first) if column not in used)]


def _warnings(facts: Profile, start: Start) -> list[str]:
    warnings = list(facts.rows.notes)
    if facts.rows.bad:
        warnings.append(f"{len(facts.rows.bad)} of the first rows cannot be read: {facts.rows.bad[0]}")
    if start.evaluates and not facts.tests and facts.reading.kind != "documents":
        warnings.append(
            f"nothing is held out of {facts.rows.words}, so that nothing is evaluated: name other rows with --eval-data"
        )
    elif start.evaluates and facts.tests and not facts.prompts:
        warnings.append(
            "the policy is not evaluated, as prompts would take the column `label` for a right answer: rename it"
        )
    if facts.lengths.longest and facts.model.context and facts.lengths.longest > facts.model.context:
        share = facts.lengths.longer(facts.model.context)
        warnings.append(
            f"{share:.0%} of the rows are longer than the {facts.model.context} tokens that the model takes"
        )
    if said := memory_warning(facts):
        warnings.append(said)
    if facts.reading.kind != "unpaired" and "label" not in facts.reading.columns:
        for column in called(("label", *VERDICTS), facts.rows.first[0]):
            if column not in facts.reading.columns.values() and facts.reading.kind == "demonstrations":
                value = json.dumps(facts.rows.first[0][column], default=str, ensure_ascii=False)
                warnings.append(
                    f"`{column}` is not used: true and false (or 1 and 0) in it would be thumbs for kto, not {value}"
                )
                break
    return warnings
