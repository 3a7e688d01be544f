"""Why a stage runs: the changes of its key since the nearest earlier run."""

from __future__ import annotations

import json
from typing import Any

from alignment_core.artifacts import Provenance
from alignment_core.execution.cache_miss import changes, in_words, why_it_runs
from alignment_core.execution.key import key_of
from tests.stages.calls import call, reference


def record(parts: dict[str, Any], label: str = "sft", finished_at: str = "2026-01-01T00:00:00+00:00") -> Provenance:
    return Provenance(
        key="a" * 64,
        stage="sft",
        label=label,
        key_parts=parts,
        finished_at=finished_at,
        outputs={"model": reference("model", "f")},
    )


def test_changes_are_shown_by_path():
    before = {"a": {"x": 1, "gone": 2}, "b": [1, 2], "c": [1]}
    after = {"a": {"x": 3, "new": 2}, "b": [1, 5], "c": [1, 2]}
    assert changes(before, after) == ["a.gone removed", "a.new added", "a.x: 1 → 3", "b.1: 2 → 5", "c: [1] → [1, 2]"]
    assert changes(before, before) == []


def test_long_lists_of_different_lengths_are_shown_by_their_numbers_of_entries():
    three = [{"task": name, "rows": 8000} for name in ("reverse", "first", "last")]
    assert changes({"sources": three}, {"sources": three[:1]}) == ["sources: 3 → 1 entries"]
    assert changes({"sources": three[:1]}, {"sources": [{"task": "reverse", "rows": 256}]}) == [
        "sources.0.rows: 8000 → 256"
    ]


def test_a_reference_and_a_digest_are_shown_short():
    assert changes({"model": f"model@sha256:{'1' * 64}"}, {"model": f"model@sha256:{'2' * 64}"}) == [
        "model: model@11111111 → model@22222222"
    ]
    assert changes({"code": "a" * 64}, {"code": "b" * 64}) == ["code: aaaaaaaa… → bbbbbbbb…"]


def test_the_reason_of_a_first_run_is_that_no_earlier_run_exists():
    other = record({"stage": "dpo"})
    assert why_it_runs(key_of(call()).parts, [other]) == "first run of this stage in this store"


def test_a_change_is_shown_against_the_nearest_earlier_run():
    near = record(key_of(call(seed=9)).parts, "near")
    far = record(key_of(call(seed=9, config={"training": {"batch_size": 1}})).parts, "far", "2026-02-01T00:00:00+00:00")
    assert why_it_runs(key_of(call()).parts, [far, near]) == "changed since near: seed: 9 → 3"


def test_among_equally_near_runs_the_latest_is_shown():
    old, new = (
        record(key_of(call(seed=1)).parts, "old"),
        record(key_of(call(seed=2)).parts, "new", "2026-03-01T00:00:00Z"),
    )
    assert why_it_runs(key_of(call()).parts, [old, new]) == "changed since new: seed: 2 → 3"


def test_many_changes_are_counted():
    earlier = record(key_of(call(seed=9, config={"training": {"bf16": True, "max_steps": 1}})).parts)
    sentence = why_it_runs(key_of(call()).parts, [earlier], "sft")
    # batch_size, bf16 and learning_rate are named; max_steps and the seed are counted
    assert sentence == (
        "changed since sft: sft.training.batch_size: 32 → 8; sft.training.bf16: True → False; "
        "sft.training.learning_rate: 1e-05 → 0.0001; and 2 more"
    )


def test_changes_are_shown_with_fields_of_the_recipe():
    changed = {
        "sft/data": ["config.data.max_length: 1 → 2", "config.sources.0.rows: 1 → 2"],
        "round-2/generate": [
            "config.generation.temperature: 1 → 2",
            "config.prompts: 64 → 128",
            "inputs.policy: a → b",
        ],
        "round-2/score": ["config.verifier.code: a → b"],
        "sft/evaluation": ["config.resamples: 1 → 2"],
        "rl": ["config.kl added", "code: a → b", "trust_remote_code added"],
        "dpo": ["code.losses.a: 1 → 2", "code.losses.b added", "packages.vllm: 0.32.0 → 0.33.0", "seed: 1 → 2"],
        "sft": [f"code.a.{number}: 1 → 2" for number in range(5)],
        "mine": ["config.x: 1 → 2"],
        "evaluation/generate": ["passed.vllm.swap: 1 → 2", "passed added"],
    }
    assert {label: in_words(lines, label) for label, lines in changed.items()} == {
        "sft/data": ["sft.data.max_length: 1 → 2", "sft.data.sources.0.rows: 1 → 2"],
        "round-2/generate": [
            "iterative_dpo.generation.temperature: 1 → 2",
            "iterative_dpo.prompts_per_round: 64 → 128",
            "input policy: a → b",
        ],
        "round-2/score": ["evaluation.verifier (its source): a → b"],
        "sft/evaluation": ["evaluation.resamples: 1 → 2"],
        "dpo": ["vllm 0.32.0 → 0.33.0", "seed: 1 → 2", "code of losses.a, losses.b changed"],
        "sft": ["code of a.0, a.1, a.2 and 2 more modules changed"],
        "rl": ["rl.kl added", "the code of alignment_core: a → b", "model.trust_remote_code added"],
        "mine": ["config.x: 1 → 2"],
        "evaluation/generate": [
            "resources.engine_options.swap: 1 → 2",
            "options of packages (resources.deepspeed, resources.engine_options) added",
        ],
    }


def data_record(label: str, kind: str, finished_at: str = "2026-01-01T00:00:00+00:00", **more: Any) -> Provenance:
    parts = {"stage": "dataset", "config": {"kind": kind}, "stream": kind, **more}
    return record(parts, label, finished_at)


def test_a_first_data_set_of_pairs_is_not_compared_with_demonstrations():
    first = {"stage": "dataset", "config": {"kind": "preferences"}, "stream": "preferences"}
    assert (
        why_it_runs(first, [data_record("sft/data", "demonstrations")], "dpo/data")
        == "first run of this stage in this store"
    )
    pairs = data_record("reward-model/data", "preferences", seed=1)
    assert why_it_runs(first, [pairs], "dpo/data").startswith("changed since reward-model/data")


def test_records_of_the_same_label_precede_those_of_other_rounds():
    parts = {"stage": "dpo", "seed": 1, "stream": "round-2"}
    near, same = record({**parts, "seed": 2}, "round-1/dpo"), record({**parts, "seed": 2, "x": 1}, "round-2/dpo")
    other = record(parts | {"stream": ""}, "dpo")
    assert why_it_runs(parts, [near, same, other], "round-2/dpo").startswith("changed since round-2/dpo")
    assert why_it_runs(parts, [near, other], "round-2/dpo").startswith("changed since round-1/dpo")


def test_stored_key_parts_equal_computed_key_parts():
    section = {"prompts": {"task": "reverse", "rows": 8}, "rewards": [{"verifier": "task"}], "steps": 3}
    parts = key_of(call(stage="rl", label="rl", config={"section": section})).parts
    assert changes(json.loads(json.dumps(parts)), parts) == []


def test_a_stage_with_an_equal_record_runs_because_its_artifact_is_gone():
    assert (
        why_it_runs(key_of(call()).parts, [record(key_of(call()).parts)]) == "its artifact is pruned, gone or damaged"
    )


def test_a_record_of_an_earlier_version_with_a_single_code_digest_is_compared() -> None:
    parts = key_of(call()).parts
    old = {name: value for name, value in parts.items() if name != "packages"} | {"code": "a" * 64}
    assert why_it_runs(parts, [record(old)], "sft") == (
        "changed since sft: the code of alignment_core: recorded in another form; versions of packages added"
    )


def test_many_changed_modules_are_one_difference_when_the_nearest_run_is_looked_for() -> None:
    parts = key_of(call()).parts
    edited = parts | {"code": dict.fromkeys(parts["code"], "0" * 16)}
    near, far = (
        record(edited, "sft"),
        record(edited | {"seed": 9, "stream": "other"}, "sft", "2026-02-01T00:00:00+00:00"),
    )
    assert why_it_runs(parts, [far, near], "sft").endswith("more modules changed")
