"""Compare and set: a tag is moved only from what the candidate was compared with."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from alignment.flows.cli.run import not_promoted, not_published
from alignment.flows.comparison import Compared
from alignment.flows.costs import promotion_line
from alignment.flows.preflight import check_recipe
from alignment.flows.runs import _check_from_stage, planned
from alignment.tasks.promotion import promote, publish
from alignment_core.artifacts import Reference, Store, collect, open_store
from alignment_core.artifacts.attachments import attachments
from alignment_core.composition.graph import composing
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.lineage import Graph
from alignment_core.lineage.decision import STAGE, read
from alignment_core.recipes import Gate, PromotionConfig, parse_recipe

SECTION = PromotionConfig(gates=(Gate(metric="accuracy", min_gain=0.0),))
BETTER: tuple[dict[str, float], dict[str, float], str] = ({"accuracy": 0.9}, {"accuracy": 0.5}, "`sft` of this run")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store")
    run: Any = SimpleNamespace(store=opened)  # a promotion uses nothing else of its run
    with composing(run), disable_run_logger():
        yield opened


@pytest.fixture
def model(store: Store, tmp_path: Path) -> Callable[[str], Reference]:
    def publish(name: str) -> Reference:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
        return store.publish(tmp_path / name, "model")

    return publish


def test_the_second_of_two_candidates_for_the_same_production_is_in_conflict(store, model):
    first, second = model("first"), model("second")
    assert promote.fn(SECTION, first, *BETTER, expected=None)["state"] == "promoted"
    outcome = promote.fn(SECTION, second, *BETTER, expected=None)
    assert outcome["state"] == "conflict"
    assert "instead of the expected nothing: check its history" in outcome["reasons"][0]
    assert store.tags.get(SECTION.tag) == first


def test_a_run_killed_after_its_promotion_counts_as_promoted(store, model):
    first, second = model("first"), model("second")
    promote.fn(SECTION, first, *BETTER, expected=None)
    promote.fn(SECTION, second, *BETTER, expected=first)  # meanwhile, by another run
    assert promote.fn(SECTION, first, *BETTER, expected=None)["state"] == "promoted"
    assert [move.to for move in store.tags.history(SECTION.tag)] == [first, second]


def test_a_candidate_that_is_production_moves_no_tag(store, model):
    first = model("first")
    promote.fn(SECTION, first, *BETTER, expected=None)
    assert promote.fn(SECTION, first, *BETTER, expected=first)["state"] == "unchanged"
    assert len(store.tags.history(SECTION.tag)) == 1


def test_a_failed_gate_refuses_with_the_missing_amount(store, model):
    policy, production = model("first"), model("second")
    for compared, beside_what in (
        (Compared(production, "candidate", "production", None), f"policy/production ({production.short})"),
        (Compared(None, "dpo", "sft", None), "`sft` of this run"),
    ):
        beside = compared.beside(SECTION.tag)
        outcome = promote.fn(SECTION, policy, {"accuracy": 0.25}, {"accuracy": 0.5}, beside, expected=None)
        assert (outcome["state"], store.tags.get(SECTION.tag)) == ("refused", None)
        assert f"accuracy gained -0.25 over {beside_what}, 0.25 less than" in outcome["reasons"][0]


def test_a_policy_that_the_tag_pointed_to_before_does_not_replace_its_successor(store, model):
    first, second = model("first"), model("second")
    promote.fn(SECTION, first, *BETTER, expected=None)
    promote.fn(SECTION, second, *BETTER, expected=first)
    outcome = promote.fn(SECTION, first, *BETTER, expected=second)  # the first recipe again, all of it cached
    assert (outcome["state"], store.tags.get(SECTION.tag)) == ("refused", second)
    assert outcome["reasons"] == [
        "policy/production pointed to it before (move 1) and was moved on; go back with align rollback"
    ]


def test_a_promotion_leaves_a_decision_that_its_move_of_the_tag_names(store, model):
    first, report = model("first"), model("report")
    outcome = promote.fn(SECTION, first, *BETTER, expected=None, report=report, run_id="0eb1c584-1111")
    (move,) = store.tags.history(SECTION.tag)
    assert (str(move.decision), move.by) == (outcome["decision"], "run 0eb1c584")
    decision = read(store, move.decision)
    assert (decision.tag, decision.policy, decision.previous, decision.passed) == (SECTION.tag, first, None, True)
    assert (decision.report, decision.run, decision.reasons) == (report, "0eb1c584-1111", ())
    (gate,) = decision.gates
    assert (gate.value, gate.before, gate.gain, gate.min_gain) == (0.9, 0.5, 0.4, 0.0)
    (record,) = store.records.makers(move.decision)
    assert (record.inputs, record.run_ids) == ({"policy": first, "report": report}, {"prefect": "0eb1c584-1111"})
    assert collect(store, delete=True, older_than=-1).garbage == ()


def test_refusals_and_conflicts_leave_decisions_too_and_an_attempt_finds_its_own_again(store, model):
    first, second = model("first"), model("second")
    promote.fn(SECTION, first, *BETTER, expected=None, run_id="one")
    conflict = promote.fn(SECTION, second, *BETTER, expected=None, run_id="two")
    refused = promote.fn(SECTION, second, {"accuracy": 0.25}, {"accuracy": 0.5}, "x", expected=first, run_id="two")
    problem = promote.fn(SECTION, second, *BETTER, expected=first, problem="another tokenizer", run_id="two")
    decisions = [read(store, Reference.parse(outcome["decision"])) for outcome in (conflict, refused, problem)]
    assert [decision.passed for decision in decisions] == [False] * 3
    assert [decision.reasons for decision in decisions] == [tuple(o["reasons"]) for o in (conflict, refused, problem)]
    assert [len(decision.gates) for decision in decisions] == [1, 1, 0]
    with Graph.of(store) as graph:
        found = {record.output for _, record in graph.used_by(second) if record.stage == STAGE}
    assert found >= {Reference.parse(outcome["decision"]) for outcome in (conflict, refused, problem)}
    again = promote.fn(SECTION, second, {"accuracy": 0.25}, {"accuracy": 0.5}, "x", expected=first, run_id="two")
    assert again["decision"] == refused["decision"]


def test_a_metric_that_is_not_finite_leaves_a_readable_decision(store, model):
    outcome = promote.fn(SECTION, model("first"), {"accuracy": math.nan}, {"accuracy": 0.5}, "x", expected=None)
    (gate,) = read(store, Reference.parse(outcome["decision"])).gates
    assert gate.value is not None
    assert math.isnan(gate.value)


def test_stages_that_only_a_promotion_adds_may_be_run_again_by_name(store, model):
    task = {"task": "first", "rows": 20}
    evaluation = {"prompts": {**task, "split": "test"}, "verifier": "task"}
    scratch = {"scratch": {"hidden_size": 16, "num_attention_heads": 2}}
    content = {"method": "sft", "name": "one", "model": scratch, "sft": {"data": task}, "evaluation": evaluation}
    recipe = parse_recipe({**content, "promotion": SECTION.model_dump()})
    chosen = SimpleNamespace(from_stage="production/evaluation")
    run: Any = SimpleNamespace(store=store, steps=[], journal=SimpleNamespace(record=chosen))
    with pytest.raises(UserError, match="this recipe has no such stage"):
        _check_from_stage(run, planned(recipe))
    store.tags.move(SECTION.tag, model("first"), None, "imported")
    _check_from_stage(run, planned(recipe))


def test_a_policy_that_cannot_be_compared_is_not_promoted(store, model):
    outcome = promote.fn(SECTION, model("first"), *BETTER, expected=None, problem="it has another tokenizer")
    assert (outcome["state"], outcome["reasons"], store.tags.get(SECTION.tag)) == (
        "refused",
        ["it has another tokenizer"],
        None,
    )


@pytest.mark.parametrize(
    ("promotion", "night", "expected"),
    [
        (None, None, False),
        ("promoted", None, False),
        ("unchanged", None, False),
        ("refused", None, True),
        ("conflict", None, True),
        ("unchanged", "refused", True),
        (None, "empty", False),
        (None, "refused", True),
    ],
)
def test_a_refused_promotion_has_its_own_exit_code(promotion, night, expected):
    state = {"promotion": promotion, "night": night}
    assert not_promoted({name: value and {"state": value} for name, value in state.items()}) is expected


def test_attestations_are_attached_to_a_policy_before_the_tag_moves(store, model, tmp_path, monkeypatch):
    first = model("first")
    with pytest.raises(EnvironmentFault, match="to sign, set ALIGN_SIGNING_KEY"):
        promote.fn(SECTION.model_copy(update={"sign": "key"}), first, *BETTER, expected=None)
    assert store.tags.get(SECTION.tag) is None
    key = tmp_path / "key.pem"
    new = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(new, check=True, capture_output=True)
    monkeypatch.setenv("ALIGN_SIGNING_KEY", str(key))
    assert promote.fn(SECTION.model_copy(update={"sign": "key"}), first, *BETTER, expected=None)["state"] == "promoted"
    assert attachments(store, first).keys() == {"bom.cdx.json", "model.sig"}, "it was made by no stage"
    second, silent = model("second"), SECTION.model_copy(update={"attest": False})
    promote.fn(silent, second, *BETTER, expected=first)
    assert attachments(store, second) == {}
    assert promote.fn(SECTION, second, *BETTER, expected=second)["state"] == "unchanged"
    assert attachments(store, second).keys() == {"bom.cdx.json"}, "the recipe requires more than before"


def test_a_signing_recipe_without_a_key_is_refused_before_the_run(store, monkeypatch):
    monkeypatch.delenv("ALIGN_SIGNING_KEY", raising=False)
    content = {"method": "sft", "name": "one", "model": "some/model", "sft": {"data": "rows.jsonl"}}
    recipe = parse_recipe({**content, "promotion": {"sign": "key"}})
    with pytest.raises(EnvironmentFault, match="to sign, set ALIGN_SIGNING_KEY"):
        check_recipe(recipe, store)


def test_a_failed_publication_is_reported_and_undoes_no_promotion(store, model):
    section = SECTION.model_copy(update={"publish": "hf://org/name"})
    first = model("first")
    outcome = promote.fn(section, first, *BETTER, expected=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # no server listens there
        outcome["publication"] = publish.fn(section, first)
    assert (outcome["state"], outcome["publication"]["state"]) == ("promoted", "failed")
    assert store.tags.get(section.tag) == first
    assert not_published({"promotion": outcome})
    assert promotion_line(outcome).startswith("policy/production: promoted; not published to hf://org/name: ")


def test_a_late_resumed_run_does_not_replace_a_later_promotion_on_the_hub(store, model):
    section = SECTION.model_copy(update={"publish": "hf://org/name"})
    first, second = model("first"), model("second")
    promote.fn(section, first, *BETTER, expected=None)
    promote.fn(section, second, *BETTER, expected=first)  # by another run, while the first one lay killed
    assert promote.fn(section, first, *BETTER, expected=None)["state"] == "promoted"
    publication = publish.fn(section, first)
    assert publication["state"] == "superseded"
    assert publication["reasons"] == [f"policy/production points to {second.short} by now"]
    assert not not_published({"promotion": {"state": "promoted", "publication": publication}})


@pytest.mark.parametrize(
    ("publication", "expected"), [(None, False), ("published", False), ("unchanged", False), ("failed", True)]
)
def test_a_promoted_but_unpublished_policy_has_its_own_exit_code(publication, expected):
    promotion = {"state": "promoted", "publication": publication and {"state": publication}}
    assert not_published({"promotion": promotion}) is expected
    assert not_published({"promotion": None}) is False
