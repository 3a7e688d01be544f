"""Stage: completions of two policies for the same prompts → verdicts of a language model, which sees both orders."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from itertools import groupby
from operator import methodcaller
from typing import Any

from alignment_core.credentials import with_path
from alignment_core.errors import DataError, UserError
from alignment_core.evaluation.files import VERDICTS
from alignment_core.evaluation.metric_names import titles
from alignment_core.evaluation.statistics import check_same_prompts
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.files import write_whole
from alignment_core.inference.http_server import served
from alignment_core.recipes.sections.pairwise_judge import PairwiseJudgeConfig
from alignment_core.rewards.endpoint import Endpoint
from alignment_core.rewards.llm_judge import (
    answer_of,
    conversation,
    filled,
    images_of_prompt,
    reads,
    request,
    text_in,
    with_images,
)
from alignment_core.rewards.results import Account, numbers
from alignment_core.rollout.images import have_images, with_paths
from alignment_core.rollout.schemas import read_rollouts

log = logging.getLogger(__name__)

BLOCK = 256
"""Questions per block of saved answers; a kill loses at most one block. The last answers of a block are waited for, so it is
larger than the usual number of concurrent requests."""
FIELD = "evaluation.judge"
NO_IMAGES = (
    f"{FIELD}.served_judge: its server reads text, and prompts have images: give an endpoint (`{FIELD}.judge`) whose model "
    "reads images, or compare the policies by an image-text reward model, a function (`evaluation.rewards`) or a verifier"
)
SERVED = "judge"
"""Name of the model on the stage's own server."""
WORTH = {"A": 1.0, "B": 0.0}
TIE = 0.5

Rows = list[dict[str, Any]]


class JudgePairsConfig(StageConfig):
    """The judge. Inputs are the ``rollouts`` of a policy and of the ``baseline``, and the model ``judge`` if it is served."""

    judge: PairwiseJudgeConfig

    def content(self) -> Any:
        content = self.judge.model_dump(mode="json", exclude={"token_variable", "max_concurrency"})
        if self.judge.judge is None:
            return {**content, "served_judge": True}  # the model is an input
        return {**content, "judge": self.judge.judge[:1]}  # further URLs are replicas with equal answers

    def packages_used(self) -> tuple[str, ...]:
        return ("jinja2", "transformers", "vllm") if self.judge.served_judge else ()


def run(context: StageContext, config: JudgePairsConfig) -> dict[str, Any]:
    """Raises UserError for prompts with images and a judge that a server of the stage would hold."""
    of_policy, of_baseline = (
        _by_prompt(context, role, config.judge.pairs_per_prompt) for role in ("rollouts", "baseline")
    )
    check_same_prompts(of_policy, of_baseline)
    if config.judge.judge is None and any(have_images(rows) for rows in of_policy.values()):
        raise UserError(NO_IMAGES)
    pairs = [
        (own, other) for prompt in of_policy for own, other in zip(of_policy[prompt], of_baseline[prompt], strict=False)
    ]
    differ = [pair for pair in pairs if pair[0]["completion_text"] != pair[1]["completion_text"]]
    # The baseline's prompt in both orders: that of a conditional policy has values that a judge should not see.
    questions = [_question(other, *order) for own, other in differ for order in ((own, other), (other, own))]
    worth = _values(context, config.judge, questions)
    shares: dict[int, list[float]] = {}
    changed: list[bool] = []  # with the position, for each pair that the judge compared
    answers = iter(zip(worth[::2], worth[1::2], strict=True))
    for own, other in pairs:
        share = TIE
        if own["completion_text"] != other["completion_text"]:
            first, second = next(answers)
            if first is None or second is None:
                continue
            changed.append(first != 1 - second)
            share = (first + 1 - second) / 2
        shares.setdefault(own["prompt"], []).append(share)
    judged = sum(map(len, shares.values()))
    if not judged:
        raise DataError(f"{FIELD}: the judge gave no verdict on any pair")
    won = {str(prompt): sum(values) / len(values) for prompt, values in shares.items()}
    failed = len(pairs) - judged
    position = {"position_changed": sum(changed) / len(changed)} if changed else {}
    content = {"prompts": won, "pairs": judged, "failed": failed, **position}
    (context.output / VERDICTS).write_text(json.dumps(content, indent=2) + "\n")
    warning = (
        f"the judge gave no verdict on {failed} of {len(pairs)} pairs, which are left out: the win rate is over {judged} pairs "
        f"of {len(won)} prompts"
    )
    return {
        "win_rate": sum(won.values()) / len(won),
        **position,
        "pairs": judged,
        **({"failed": failed, "warnings": [warning]} if failed else {}),
    }


def _by_prompt(context: StageContext, role: str, most: int) -> dict[int, Rows]:
    rows = with_paths(read_rollouts(context.inputs[role]), context.inputs[role])
    return {prompt: list(group)[:most] for prompt, group in groupby(rows, key=lambda row: int(row["prompt"]))}


def _question(prompt: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": prompt["source"],
        "prompt_text": prompt["prompt_text"],
        "values": {
            "prompt": conversation(prompt),
            "completion_a": first["completion_text"],
            "completion_b": second["completion_text"],
            "label": prompt["label"],
        },
        "images": images_of_prompt(prompt),
    }


def _values(context: StageContext, config: PairwiseJudgeConfig, questions: Rows) -> list[float | None]:
    """The value of the first completion against the second for each question: 1, 0 or a half; None without a verdict."""
    values: list[float | None] = []
    name = config.judge_model or SERVED

    def worth(choice: dict[str, Any]) -> float:
        return WORTH.get(text_in(answer_of(choice), config.verdict), TIE)

    def connect(stack: ExitStack) -> Endpoint:
        bases = config.judge
        token = None
        stop_ids: tuple[int, ...] = ()
        if bases is None:
            stack.enter_context(context.machines.trainers(context.ticket))  # the server computes in their place
            with context.ticket.starting("the judge's server, and loads its model"):
                folder, trust = str(context.inputs["judge"]), context.trust_remote_code
                wait = context.resources.wait_timeout_seconds
                judge = served(folder, name, context.resources, start_seconds=wait, trust_remote_code=trust)
                server = stack.enter_context(judge)
            bases, token, stop_ids = (server.url,), server.token, server.stop_ids
            if server.shortened:
                log.warning("%s: %s", FIELD, server.shortened)

        def request_for(rows: Any) -> dict[str, Any]:
            question = with_images(filled(config.template, rows[0]["values"]), rows[0]["images"])
            return request(name, question, config, False, stop_ids)

        urls = [with_path(url, "chat/completions") for url in bases]
        timeout = context.resources.reward_timeout_seconds
        where, read, most = f"{FIELD}.judge", reads(worth), config.max_concurrency
        return Endpoint(urls, 1, config.token_variable, timeout, where, request_for, read, token, most)

    account = Account(f"the judge {name}", config.max_failed, f"{FIELD}.max_failed", len(questions))
    endpoint: Endpoint | None = None
    with ExitStack() as stack:
        for start in range(0, len(questions), BLOCK):
            kept = context.progress / f"block-{start}.json"
            if kept.is_file():
                of_block = json.loads(kept.read_text())
                account.restore("".join(str(int(value is None)) for value in of_block))
            else:
                endpoint = endpoint or connect(stack)
                block = questions[start : start + BLOCK]
                of_block = numbers(account.settle(block, endpoint(block)))
                write_whole(kept, methodcaller("write", json.dumps(of_block).encode()))
            values += of_block
            context.report(len(values), len(questions), "questions")
    return values


SHOWS = titles("win_rate", "position_changed")
STAGE = Stage("judge_pairs", 1, {"verdicts": "verdicts"}, JudgePairsConfig, run, SHOWS)
