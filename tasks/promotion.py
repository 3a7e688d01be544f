"""The tasks that promote a policy and publish it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from alignment_core.artifacts import Reference
from alignment_core.attestation.attest import attest_promotion
from alignment_core.composition.graph import current
from alignment_core.errors import AlignmentError, Conflict
from alignment_core.evaluation.gates import JudgedGate, judged
from alignment_core.journal import short_id
from alignment_core.lineage.decision import Decision, record
from alignment_core.recipes import PromotionConfig


@task(name="promote", task_run_name="promotion", cache_policy=NO_CACHE, persist_result=False)
def promote(
    section: PromotionConfig,
    policy: Reference,
    metrics: dict[str, float],
    baseline: dict[str, float],
    beside: str,
    expected: Reference | None,
    problem: str | None = None,
    report: Reference | None = None,
    run_id: str = "",
) -> dict[str, Any]:
    """Move the recipe's tag from ``expected`` to ``policy`` if every gate passes; returns the decision as plain data, and keeps
    it in the store, see :class:`~alignment_core.lineage.decision.Decision`.

    ``beside`` names the policy of the ``baseline``, ``report`` are the evaluations of both. ``problem`` says why the two could
    not be compared. A policy that the tag has pointed to before does not replace its successor: that would be a rollback, which
    is a command of its own.
    """
    store = current().store
    logger = get_run_logger()
    outcome = {"tag": section.tag, "policy": str(policy), "previous": str(expected) if expected else None}

    def keep(passed: bool, reasons: Sequence[str], gates: tuple[JudgedGate, ...]) -> Reference:
        compared = {"policy": policy, "previous": expected, "beside": beside, "report": report}
        decided = {"tag": section.tag, "passed": passed, "reasons": tuple(reasons), "gates": gates, "run": run_id}
        return record(store, Decision(**decided, **compared))

    def refused(state: str, reasons: list[str], gates: tuple[JudgedGate, ...] = ()) -> dict[str, Any]:
        logger.warning("not promoted: %s", "; ".join(reasons))
        return {**outcome, "state": state, "reasons": reasons, "decision": str(keep(False, reasons, gates))}

    history = store.tags.history(section.tag)
    if expected == policy:
        attest_promotion(store, section, policy)  # the recipe may require more than when the tag moved
        return {**outcome, "state": "unchanged", "reasons": []}
    earlier = next((move for move in history if move.to == policy), None)
    if earlier and history[-1].to == expected:
        reason = (
            f"{section.tag} pointed to it before (move {earlier.number}) and was moved on; go back with align rollback"
        )
        return refused("refused", [reason])
    gates = () if problem else tuple(judged(section.gates, metrics, baseline, beside))
    failed = [problem] if problem else [sentence for gate in gates for sentence in gate.failures]
    if failed:
        return refused("refused", failed, gates)
    attest_promotion(store, section, policy)
    decision = keep(True, (), gates)
    passed = ", ".join(f"{gate.metric} {metrics[gate.metric]:.4g}" for gate in section.gates) or "no gates"
    try:
        reason = f"gates passed: {passed}"
        store.tags.move(
            section.tag, policy, expected, reason, decision=decision, by=f"run {short_id(run_id)}" if run_id else ""
        )
    except Conflict as conflict:
        # A resumed run that was killed after its promotion meets its own move here.
        if not any(move.to == policy and move.previous == expected for move in store.tags.history(section.tag)):
            return refused("conflict", [str(conflict)], gates)
    return {**outcome, "state": "promoted", "reasons": [], "decision": str(decision)}


@task(name="publish", task_run_name="publication", cache_policy=NO_CACHE, persist_result=False)
def publish(section: PromotionConfig, policy: Reference) -> dict[str, Any]:
    """Publish a promoted policy to the Hub; returns the outcome as plain data.

    A failure does not undo the promotion: the state is ``failed`` with the reason, and the next attempt of the run publishes.
    If the tag has moved on meanwhile, the state is ``superseded``: the policy must not replace its successor on the Hub.
    """
    from alignment_core.attestation.publishing import publish

    assert section.publish, "the recipe asks for it"
    store = current().store
    if (promoted := store.tags.get(section.tag)) != policy:
        reason = f"{section.tag} points to {promoted.short if promoted else 'nothing'} by now"
        return {"repo": section.publish, "state": "superseded", "reasons": [reason]}
    try:
        done = publish(store, policy, section.publish)
    except AlignmentError as error:
        get_run_logger().error("not published to %s: %s", section.publish, error)
        return {"repo": section.publish, "state": "failed", "reasons": [str(error)]}
    state = "published" if done.new else "unchanged"
    return {"repo": section.publish, "state": state, "reasons": [], "commit": done.commit, "url": done.url}
