"""Texts of a run: samples, pairs and training rows of its stages, and each policy's completions of a prompt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.errors import UserError
from alignment_core.journal import StageLine
from alignment_core.recipes.sections.rewards import CHOICE, reward_names
from alignment_core.rollout.schemas import SCORES

Row = dict[str, Any]
"""Texts and numbers by name: ``prompt``, ``completion``, ``reward``; or ``chosen``, ``rejected``; or ``text``."""

SHARDS, DATA, STEPS = "shard-*.parquet", "train.parquet", "step-*.parquet"
SHOWN = {
    "step": "step",
    "prompt_text": "prompt",
    "completion_text": "completion",
    **{name: name for name in ("label", "reward", "rewards", "verifier", "finish_reason")},
}
"""Columns of completions to show, in this order, by their titles. ``step`` is the training step that they were sampled for,
as in the curves."""
HIDDEN = ("source", "task", "messages", "tools")
"""Columns of data sets that hold a row's origin, or the prompt a second time."""
ROLLOUTS_FROM = ("rollouts", "scores")
"""Roles of the inputs that lead from a result without text to its completions."""
EVALUATION = "/evaluation/generate"
SAMPLES = ("rl", "generate")
"""Stages whose completions are shown if no policies are compared."""


def samples(store: Store, lines: Mapping[str, StageLine], label: str, count: int) -> list[Row]:
    """Up to ``count`` rows that the stage ``label`` of a run made or refers to, evenly spaced.

    ``lines`` are the run's stages. Raises UserError if there is no such stage, or it has no text.
    """
    line = lines.get(label)
    text = _folder_of(store, line)
    if text is None:
        with_text = stages_with_text(store, lines)
        near = difflib.get_close_matches(label, with_text, n=3, cutoff=0.4) or with_text
        problem = "is not a stage of this run" if line is None else "has no text" if line.reference else "is not done"
        raise UserError(f"--stage {label}: it {problem}; stages with text are {', '.join(near) or 'none so far'}")
    folder, rollouts = text
    if any(folder.glob(SHARDS)):
        rows, scores = list(_read(sorted(folder.glob(SHARDS)))), _scores_of(store, rollouts, lines, label)
        if scores:
            rows = [{**row, **score} for row, score in zip(rows, scores, strict=True)]
    else:
        steps = sorted(folder.glob(STEPS))
        if not steps:
            return spaced(of_data(folder / DATA), count)
        step, names = int(steps[-1].stem.removeprefix("step-")) + 1, _names_of_rewards(store, line)
        rows = [{**row, "step": step, **_given(row, names)} for row in _read(steps[-1:])]
    return [_shown(row) for row in spaced(rows, count)]


def stages_with_text(store: Store, lines: Mapping[str, StageLine]) -> list[str]:
    """Labels of the stages of a run that :func:`samples` can show."""
    return [label for label, line in lines.items() if _folder_of(store, line) is not None]


def without_comparison(store: Store, lines: Mapping[str, StageLine], count: int) -> tuple[str | None, list[Row]]:
    """The first stage of a run that sampled completions, and rows of it; nothing if none did."""
    label = next((label for label, line in lines.items() if line.stage in SAMPLES and line.reference), None)
    return label, samples(store, lines, label, count) if label else []


def compared(store: Store, lines: Mapping[str, StageLine], count: int) -> tuple[list[str], list[Row]]:
    """The policies of a run that answered the same prompts, and up to ``count`` of these with each one's first completion.

    A row has ``prompt``, ``label`` if the prompts have one, and a completion by each policy's name. Nothing if the run
    did not sample the same prompts from two policies.
    """
    groups: dict[str, dict[str, Path]] = {}
    evaluations = {label: line for label, line in lines.items() if label.endswith(EVALUATION)}
    with ThreadPoolExecutor() as pool:
        folders = pool.map(lambda line: _folder_of(store, line), evaluations.values())
    for (label, line), text in zip(evaluations.items(), folders, strict=True):
        if text is not None:
            groups.setdefault(line.key_parts["inputs"]["prompts"], {})[label.removesuffix(EVALUATION)] = text[0]
    # Policies of branches have a prefix in their names; first come those of the run itself.
    policies = max(groups.values(), key=lambda group: (-min(name.count("/") for name in group), len(group)), default={})
    if len(policies) < 2:
        return [], []
    rows: list[Row] = []
    for name, folder in policies.items():
        first = [row for row in _read(sorted(folder.glob(SHARDS))) if row["sample"] == 0]
        for place, row in enumerate(spaced(first, count)):
            if place == len(rows):
                rows.append({"prompt": row["prompt_text"]} | ({} if row["label"] is None else {"label": row["label"]}))
            rows[place][name] = row["completion_text"]
    return list(policies), rows


def spaced(rows: Sequence[Any], count: int) -> list[Any]:
    """Up to ``count`` rows at equal distances, since data sets are often sorted by source."""
    if len(rows) <= count:
        return list(rows)
    return [rows[number * len(rows) // count] for number in range(count)]


def _folder_of(store: Store, line: StageLine | None) -> tuple[Path, Reference] | None:
    """The folder with the text that a stage made or judged, and its artifact; None if there is no text."""
    candidates = [Reference.parse(text) for text in line.outputs.values()] if line else []
    while candidates:
        with_text = next((reference for reference in candidates if _has_text(store, reference)), None)
        if with_text is not None:
            return store.fetch(with_text), with_text
        # Several stages may have made this artifact from different inputs: the inputs of this run's stage come first.
        records = [record.inputs for record in store.records.makers(candidates[0])] if line is None else [_inputs(line)]
        line = None
        candidates = [inputs[role] for inputs in records for role in ROLLOUTS_FROM if role in inputs][:1]
    return None


def _has_text(store: Store, reference: Reference) -> bool:
    """Whether an artifact holds text, without fetching it."""
    if store.is_pruned(reference):
        return False
    paths = [entry.path for entry in store.manifest(reference).files]
    return any(fnmatchcase(path, pattern) for path in paths for pattern in (SHARDS, DATA, STEPS))


def _inputs(line: StageLine) -> dict[str, Reference]:
    return {role: Reference.parse(text) for role, text in line.key_parts["inputs"].items()}


def _given(score: Row, names: Sequence[str]) -> Row:
    """The numbers of a completion; with several rewards, the number of each by its name."""
    rewards = score.get("rewards") or ()
    names = names if len(names) == len(rewards) else [f"reward_{number}" for number in range(len(rewards))]
    by_name = dict(zip(names, rewards, strict=True)) if len(rewards) > 1 else None
    return {"reward": score.get("reward"), "rewards": by_name, "verifier": score.get("verifier")}


def _names_of_rewards(store: Store, line: StageLine | None) -> list[str]:
    """The names of a stage's rewards; none if its record is missing, or a kind of reward is not installed."""
    record = store.records.by_key([line.made_by or line.key]).values() if line else ()
    for stage_record in record:
        config = stage_record.config.get("section", stage_record.config)
        with suppress(UserError, ValueError):
            return reward_names([CHOICE.validate(reward) for reward in config.get("rewards", ())])
    return []


def _scores_of(store: Store, rollouts: Reference, lines: Mapping[str, StageLine], label: str) -> list[Row]:
    """The scores that this run gave to these completions; empty if it gave none. Of several, those that the stage ``label``
    made or read come first: evaluations of branches may share completions and judge them differently."""
    inputs = lines[label].key_parts["inputs"].values()
    own = [line for line in lines.values() if line.reference in inputs]
    for line in (lines[label], *own, *lines.values()):
        if line.reference and line.key_parts["inputs"].get("rollouts") == str(rollouts):
            path = store.fetch(Reference.parse(line.reference)) / SCORES
            if path.is_file():
                names = _names_of_rewards(store, line)
                return [_given(row, names) for row in _read([path])]
    return []


def _read(paths: Sequence[Path]) -> Iterable[Row]:
    import pyarrow.parquet as pq

    for path in paths:
        yield from pq.read_table(path).to_pylist()


def of_data(path: Path) -> list[Row]:
    """The rows of a data set, of whatever kind: their texts, then their numbers and truth values."""
    import pyarrow.parquet as pq
    import pyarrow.types as types

    table = pq.read_table(path)
    columns = [field for field in table.schema if field.name not in HIDDEN and not types.is_list(field.type)]
    columns.sort(key=lambda field: not types.is_string(field.type))
    shown = table.select([field.name for field in columns]).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in shown]


def _shown(row: Row) -> Row:
    shown: Row = {}
    for column, name in SHOWN.items():
        if row.get(column) is not None:
            shown[name] = _rounded(row[column])
    return shown


def _rounded(value: Any) -> Any:
    """32-bit numbers rounded to their significant digits: 0.6666666865348816 is 0.666667."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def text_of(value: Any) -> str:
    """A value of a row as text: numbers are shortened, and several numbers have their names."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text_of(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    return "none" if value is None else str(value)
