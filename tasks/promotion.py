"""The tasks that promote a policy and publish it."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from alignment_core.artifacts import Reference
from alignment_core.attestation.attest import attest_promotion
from alignment_core.composition.graph import current
from alignment_core.errors import AlignmentError, Conflict
from alignment_core.evaluation.gates import refusals
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
) -> dict[str, Any]:
    """Move the recipe's tag from ``expected`` to ``policy`` if every gate passes; returns the decision as plain data.

    ``beside`` names the policy of the ``baseline``. ``problem`` says why the two could not be compared. A policy that the tag
    has pointed to before does not replace its successor: that would be a rollback, which is a command of its own.
    """
    store = current().store
    logger = get_run_logger()
    outcome = {"tag": section.tag, "policy": str(policy), "previous": str(expected) if expected else None}
    history = store.tags.history(section.tag)
    if expected == policy:
        attest_promotion(store, section, policy)  # the recipe may require more than when the tag moved
        return {**outcome, "state": "unchanged", "reasons": []}
    earlier = next((move for move in history if move.to == policy), None)
    if earlier and history[-1].to == expected:
        reason = (
            f"{section.tag} pointed to it before (move {earlier.number}) and was moved on; go back with align rollback"
        )
        logger.warning("not promoted: %s", reason)
        return {**outcome, "state": "refused", "reasons": [reason]}
    failed = [problem] if problem else refusals(section.gates, metrics, baseline, beside)
    if failed:
        logger.warning("not promoted: %s", "; ".join(failed))
        return {**outcome, "state": "refused", "reasons": failed}
    attest_promotion(store, section, policy)
    passed = ", ".join(f"{gate.metric} {metrics[gate.metric]:.4g}" for gate in section.gates) or "no gates"
    try:
        store.tags.move(section.tag, policy, expected, reason=f"gates passed: {passed}")
    except Conflict as conflict:
        # A resumed run that was killed after its promotion meets its own move here.
        if not any(move.to == policy and move.previous == expected for move in store.tags.history(section.tag)):
            logger.warning("not promoted: %s", conflict)
            return {**outcome, "state": "conflict", "reasons": [str(conflict)]}
    return {**outcome, "state": "promoted", "reasons": []}


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
