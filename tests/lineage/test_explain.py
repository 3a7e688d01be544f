"""Why a stage ran or was cached, and where the compared results were made."""

from __future__ import annotations

from typing import Any

from alignment_core.artifacts import Provenance, Reference
from alignment_core.journal import StageLine
from alignment_core.lineage.explain import explain


def record(key: str, at: int, run: str, hardware: dict[str, Any], **config: Any) -> Provenance:
    return Provenance(
        key=key * 64,
        stage="sft",
        label="sft",
        key_parts={"stage": "sft", "config": config},
        finished_at=f"2026-01-01T00:00:{at:02d}+00:00",
        hardware=hardware,
        run_ids={"prefect": run},
        outputs={"model": Reference("model", key * 64)},
    )


def line(key: str, state: str, at: int, **config: Any) -> StageLine:
    parts = {"stage": "sft", "config": config}
    stamp = f"2026-01-01T00:00:{at:02d}+00:00"
    return StageLine(label="sft", stage="sft", key=key * 64, key_parts=parts, state=state, at=stamp)


def test_a_stage_that_ran_is_explained_by_changes_of_key_and_hardware() -> None:
    before = record("a", 1, "one", {"cpu": "EPYC", "trainers": 1}, training={"bf16": False})
    after = record("b", 5, "two", {"cpu": "EPYC", "trainers": 2}, training={"bf16": True})
    (explained,) = explain([line("b", "run", 5, training={"bf16": True})], [before, after], "two")
    assert explained.changed == ("sft.training.bf16: False → True",)
    assert explained.elsewhere == ("trainers: 1 → 2",)


def test_a_cached_stage_names_its_run_and_hardware() -> None:
    maker = record("a", 1, "one", {"cpu": "EPYC", "trainers": 2})
    (explained,) = explain([line("a", "cached", 5)], [maker], "two")
    assert explained.why.endswith("run one, made on EPYC, 2 trainers")


def test_the_module_and_the_package_that_changed_are_named() -> None:
    code, packages = {"alignment_core.losses.policy": "a" * 16}, {"vllm": "0.32.0"}
    before = record("a", 1, "one", {})
    before.key_parts.update(code=code, packages=packages)
    after = line("b", "run", 5)
    after.key_parts.update(code={"alignment_core.losses.policy": "b" * 16}, packages={"vllm": "0.33.0"})
    (explained,) = explain([after], [before], "two")
    assert explained.changed == ("vllm 0.32.0 → 0.33.0", "code of alignment_core.losses.policy changed")
