"""The sections that several methods begin with, with the numbers that the facts suggest and a comment beside each."""

from __future__ import annotations

from typing import Any

from alignment_core.errors import UserError
from alignment_core.init.base import Profile
from alignment_core.init.lengths import MOST_CUT, ROUND, rounded, share
from alignment_core.init.machine import FULL_BYTES
from alignment_core.init.text import Said

LONGEST_ON_GPU, LONGEST_ON_CPU, UNMEASURED = 4096, 2048, 1024
"""Tokens that a row of a first recipe may have."""
ANSWER = 200
"""Tokens of an answer where nobody measured any."""
LEAST_BYTES = 3
"""Of memory for each parameter with LoRA in bf16, whose weights stay as they are; twice as many in fp32."""
FASTER_WITH_LORA = 10
"""Adapters learn with a learning rate so many times as high."""


def longest_row(facts: Profile) -> int:
    """The most tokens that a row may have here."""
    most = LONGEST_ON_GPU if facts.machine.gpus else LONGEST_ON_CPU
    most = most if facts.lengths.rows else UNMEASURED
    return min(most, facts.model.context or most)


def data(facts: Profile, documents: bool = False) -> dict[str, Any]:
    """The rows to train on, and which of them are held out."""
    sources = facts.all_sources
    found: dict[str, Any] = {"sources": sources, **_max_length(facts, documents)}
    if facts.test_rows:
        found["test_rows"] = Said(facts.test_rows, "held out to measure on, no prompt of theirs is trained on")
    return found


def _max_length(facts: Profile, documents: bool) -> dict[str, Any]:
    lengths, most = facts.lengths, longest_row(facts)
    if not lengths.rows:
        return {"max_length": Said(most, "tokens; the rows were not measured")}
    seen = f"the longest of {len(lengths.rows):,} that were measured has {lengths.longest}"
    if documents:
        return {"max_length": Said(min(rounded(lengths.longest), most), f"tokens; longer texts become blocks; {seen}")}
    if lengths.longest <= most:
        return {"max_length": Said(min(rounded(lengths.longest * 1.1), most), f"tokens of a row; {seen}")}
    longer = lengths.longer(most)
    fate = "cut" if longer > MOST_CUT else "dropped"
    comment = f"tokens of a row; {max(longer, 0.001):.1%} have more and are {fate}: {seen}"
    return {"max_length": Said(most, comment), **({"overlong": "truncate"} if fate == "cut" else {})}


def answer_room(facts: Profile, least: int = ROUND) -> int:
    """Tokens that a policy's answers may have: what the rows' own have, and what the model takes."""
    own = share(facts.lengths.answers, 0.95) if facts.lengths.rows else ANSWER
    wanted = rounded(max(least, 1.25 * own))
    wanted = min(wanted, 1024 if facts.machine.gpus else 256)
    return min(wanted, max(16, (facts.model.context or longest_row(facts)) // 2))


def prompts(facts: Profile, sources: list[dict[str, Any]], room: int) -> dict[str, Any]:
    """Prompts that leave so many tokens for the answer."""
    most = max(16, longest_row(facts) - room)
    longest = facts.lengths.prompts[-1] if facts.lengths.prompts else most
    return {"sources": sources, "max_length": Said(min(rounded(longest * 1.1), most), "tokens of a prompt")}


def training(
    facts: Profile, learning_rate: float, scratch: float, epochs: bool = True, rows: int = 1
) -> dict[str, Any]:
    """Optimiser and schedule. ``scratch`` is the learning rate of a new model; each row counts as so many ``rows``."""
    count, found = facts.rows.count, dict[str, Any]()
    if epochs:
        found["num_train_epochs"] = 1 if count >= 10_000 else 2 if count >= 1_000 else 3
    size = 64 if count >= 10_000 else 32 if count >= 1_000 else 16 if count >= 200 else 8
    found["batch_size"] = Said(size * rows, f"rows in a step; there are {facts.rows.words}")
    lora = _lora(facts)
    rate = scratch if facts.model.is_scratch else learning_rate * (FASTER_WITH_LORA if lora else 1)
    found["learning_rate"] = Said(rate, _rate_comment(facts, lora, learning_rate))
    found["warmup_ratio"] = 0.05
    return {**found, **lora, **precision(facts)}


def precision(facts: Profile) -> dict[str, Any]:
    """bf16 where there is a GPU."""
    return {"bf16": Said(True, f"this machine has {facts.machine.words}")} if facts.machine.gpus else {}


def _rate_comment(facts: Profile, lora: dict[str, Any], usual: float) -> str:
    if facts.model.is_scratch:
        return f"a new model learns fast; about {usual:g} for one that is trained already"
    return "about ten times that of full training" if lora else "lower it if the loss jumps"


def needs_lora(facts: Profile) -> bool:
    """Whether training all of the model's weights would not fit into this machine's memory."""
    return facts.model.parameters is not None and not facts.machine.holds(facts.model.parameters)


def _lora(facts: Profile) -> dict[str, Any]:
    if not needs_lora(facts):
        return {}
    needed = (facts.model.parameters or 0) * FULL_BYTES / 2**30
    why = f"all weights would need {needed:.0f} GiB; {facts.machine.words} here"
    return {"lora": Said({"r": 16, "lora_alpha": 32}, why)}


def memory_warning(facts: Profile) -> str | None:
    """A sentence where not even adapters fit."""
    each = LEAST_BYTES if facts.machine.gpus else 2 * LEAST_BYTES
    if facts.model.parameters is None or facts.machine.holds(facts.model.parameters, each):
        return None
    return (
        f"{facts.model.name} has {facts.model.size}: with {facts.machine.words} not even LoRA is likely to fit; take a smaller "
        "model, `lora.load_in_4bit`, or a larger machine"
    )


def evaluation(facts: Profile, answers: int = 1, verifier: bool = True) -> dict[str, Any]:
    """Held-out prompts, answered by the policy before and after; nothing where none are held out."""
    if not facts.prompts:
        return {}
    room, most = answer_room(facts), 200 if facts.machine.gpus or facts.model.is_scratch else 64
    asked = prompts(facts, [{**one, "rows": most} for one in facts.prompts], room)
    found: dict[str, Any] = {"prompts": asked, "generation": generation(answers, room)}
    if facts.rewards:
        found["rewards"] = reward_list(facts)
    if verifier and facts.verifier:
        found["verifier"] = Said(facts.verifier, "says which answers are right, by the label")
    found["generation"] |= decoding("verifier" in found or "rewards" in found)
    return {"evaluation": found}


def reward_list(facts: Profile) -> list[Any]:
    """The reward functions that somebody named; their sum counts."""
    return [{"function": name} for name in facts.rewards]


def decoding(scored: bool) -> dict[str, Any]:
    """The temperature of an evaluation: answers that are ``scored`` are the likeliest ones; otherwise only the KL to the start
    is measured, which needs samples."""
    if scored:
        return {
            "temperature": Said(0, "greedy: the likeliest answer; 1 samples, and measures the KL to the start, too")
        }
    return {"temperature": Said(1, "sampled, so that the KL to the start is measured; 0 is greedy")}


def generation(answers: int, room: int) -> dict[str, Any]:
    """How policies are sampled."""
    return {"num_generations": answers, "max_completion_length": Said(room, "tokens of an answer")}


def steps(facts: Profile, per_step: int) -> int:
    """Steps that use each prompt about twice, and at most 200 to begin with."""
    return max(10, min(200, 2 * facts.rows.count // per_step))


def check_verified(facts: Profile, method: str) -> str:
    """The verifier. Raises UserError where the rows have no label that one of ours understands."""
    if facts.verifier is not None:
        return facts.verifier
    column = facts.reading.columns.get("label")
    what = f"`{column}` is no number, formula or test of a program" if column else "no column holds a right answer"
    raise UserError(
        f"method {method}: nothing says which answers are right, as {what}: name the column with --column label=NAME"
        + (", or a reward function of yours with --reward file.py:function" if method == "rl" else "")
    )
