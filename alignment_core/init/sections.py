"""The sections that several methods share, with numbers from the rows, the model and the machine, and comments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from alignment_core.checks.traps import FEW_STEPS
from alignment_core.errors import UserError
from alignment_core.init import memory
from alignment_core.init.base import Profile
from alignment_core.init.text import Commented, plain
from alignment_core.machine_memory import GIB

MULTIPLE = 32
"""Limits in tokens are multiples of it."""
LONGEST_ON_GPU = 4096
LONGEST_ON_CPU = 2048
LONGEST_UNMEASURED = 1024
"""Limits of a row in tokens; the last one for rows that were not measured."""
ANSWER = 200
"""Tokens of an answer if none were measured."""
THOUGHTS_ON_GPU = 4096
THOUGHTS_ON_CPU = 1024
"""Tokens of an answer of a model that thinks first; answers that end there have no end to reward."""
MOST_DROPPED = 0.05
"""Share of rows above the limit that are dropped; of more rows the end is cut off."""
LORA_RATE = 10
"""Factor of the learning rate for adapters."""
LOSS_GATE = Commented({"metric": "test_loss", "min_gain": 0}, "no higher on held-out rows than before training")
TEST_GATES = {
    "continued-pretraining": LOSS_GATE,
    "distillation": LOSS_GATE,
    "dpo": Commented({"metric": "test_margin", "min": 0.0001}, "prefers the better answers of held-out pairs"),
    "kto": Commented({"metric": "test_accuracy", "min": 0.5}, "tells good from bad held-out answers"),
    "sft": LOSS_GATE,
}
"""Gates on what a method measures on its held-out rows: better than chance, or than before."""
ACCURACY_GATE = Commented({"metric": "accuracy", "min_gain": 0}, "no worse than the model with the tag")
NOT_WORSE_GATE = Commented({"metric": "win_rate.high", "min": 0.5}, "not measurably worse than the model with the tag")
"""Beside a gate on the loss that is trained: a few answers that change by chance do not refuse the policy."""
TAG = "the name of the result in the store"


def longest_row(profile: Profile) -> int:
    """The limit of a row in tokens."""
    most = LONGEST_ON_GPU if profile.machine.gpus else LONGEST_ON_CPU
    most = most if profile.lengths.rows else LONGEST_UNMEASURED
    return min(most, profile.model.context or most)


def data(profile: Profile, documents: bool = False) -> dict[str, Any]:
    """The rows to train on, and the held-out ones."""
    section = _rows(profile, profile.all_sources, _max_length(profile, documents))
    if test_rows := profile.held_out.test_rows:
        if documents:  # whose blocks are the rows, and stay together
            blocks = [math.ceil(length / plain(section["max_length"])) for length in profile.lengths.rows or [1]]
            test_rows = round(test_rows * mean(blocks))
        section["test_rows"] = Commented(test_rows, "held out; their prompts are not trained on")
    return section


def _rows(profile: Profile, sources: list[dict[str, Any]], limits: dict[str, Any]) -> dict[str, Any]:
    template = profile.mapping.template
    further = {"prompt_template": Commented(template, "the further column")} if template else {}
    return {"sources": sources, **limits, **further}


def _max_length(profile: Profile, documents: bool) -> dict[str, Any]:
    lengths, most = profile.lengths.rows, longest_row(profile)
    if not lengths:
        return {"max_length": Commented(most, "tokens; the rows were not measured")}
    longest = lengths[-1]
    measured = f"the longest of {len(lengths):,} that were measured has {longest}"
    if documents:
        comment = f"tokens; longer texts become blocks; {measured}"
        return {"max_length": Commented(min(_rounded(longest), most), comment)}
    if longest <= most:
        return {"max_length": Commented(min(_rounded(longest * 1.1), most), f"tokens of a row; {measured}")}
    longer = sum(length > most for length in lengths) / len(lengths)
    truncate = longer > MOST_DROPPED
    effect = "truncated" if truncate else "dropped"
    comment = f"tokens of a row; {max(longer, 0.001):.1%} have more and are {effect}: {measured}"
    return {"max_length": Commented(most, comment), **({"overlong": "truncate"} if truncate else {})}


def answer_room(profile: Profile, least: int = MULTIPLE) -> int:
    """The limit of a policy's answers in tokens: a quarter above the rows' own, as far as the model takes them."""
    own = _quantile(profile.lengths.answers, 0.95) if profile.lengths.rows else ANSWER
    wanted = min(_rounded(max(least, 1.25 * own)), 1024 if profile.machine.gpus else 256)
    if profile.lengths.thinks:
        wanted = THOUGHTS_ON_GPU if profile.machine.gpus else THOUGHTS_ON_CPU
    return min(wanted, max(16, (profile.model.context or longest_row(profile)) // 2))


def _quantile(ascending: Sequence[int], share: float) -> int:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else 0


def _rounded(length: float) -> int:
    """The next multiple of :data:`MULTIPLE`."""
    return max(MULTIPLE, -(-int(length) // MULTIPLE) * MULTIPLE)


def prompts(profile: Profile, sources: list[dict[str, Any]], room: int) -> dict[str, Any]:
    """Prompts that leave ``room`` tokens for the answer."""
    most = longest_row(profile)
    if profile.machine.gpus:  # beside the answer, as far as the model takes both
        most = min(most + room, profile.model.context or most)
    most = max(16, most - room)
    longest = profile.lengths.prompts[-1] if profile.lengths.prompts else most
    limits = {"max_length": Commented(min(_rounded(longest * 1.1), most), "tokens of a prompt")}
    return _rows(profile, sources, limits)


def preference_training(profile: Profile) -> dict[str, Any]:
    """Optimiser and schedule of DPO and KTO, with the longer warm-up of Zephyr's and Tülu 3's DPO."""
    return training(profile, 1e-6, 2e-4) | {"warmup_ratio": 0.1}


def given_tokens(profile: Profile) -> int:
    """Tokens of the longest of the user's rows; a pair is one row of two sequences, each with the prompt."""
    longest = min(longest_row(profile), *(profile.lengths.rows[-1:] or [LONGEST_UNMEASURED]))
    return 2 * longest if profile.mapping.kind == "preferences" else longest


def sampled_tokens(profile: Profile, room: int, method: str) -> int:
    """Tokens of the longest row that a method makes of a prompt and answers of ``room`` tokens: of a pair, or of one answer."""
    longest = min(longest_row(profile), *(profile.lengths.prompts[-1:] or [LONGEST_UNMEASURED])) + room
    return 2 * longest if method == "iterative-dpo" else longest


def fit(profile: Profile, tokens: int, shares: bool = False) -> memory.Fit | None:
    """How the model fits on a GPU of this machine; ``tokens`` and ``shares`` are those of :func:`memory.fit`."""
    return memory.fit(profile.machine, profile.model, tokens, shares)


def _trained_tokens(profile: Profile, written: dict[str, Any]) -> dict[str, int]:
    """Tokens of the longest row of each method of these sections that trains."""
    sections = {name: section for name, section in plain(written).items() if isinstance(section, dict)}
    trained = {name.replace("_", "-"): section for name, section in sections.items() if "training" in section}
    return {
        method: sampled_tokens(profile, section["generation"].get("max_completion_length", LONGEST_UNMEASURED), method)
        if "generation" in section
        else given_tokens(profile)
        for method, section in trained.items()
    }


def _fit_of(profile: Profile, written: dict[str, Any]) -> tuple[memory.Fit | None, bool, bool]:
    """How the model fits with these sections, and whether they train and sample."""
    tokens = _trained_tokens(profile, written)
    fitted = fit(profile, max(tokens.values(), default=given_tokens(profile)), shares="rl" in tokens)
    sections = (section for section in plain(written).values() if isinstance(section, dict))
    return fitted, bool(tokens), any("generation" in section for section in sections)


def memory_fields(profile: Profile, written: dict[str, Any]) -> dict[str, Any]:
    """Fields of `resources` for a recipe with these sections, from the memory of a GPU as it was counted."""
    fitted, trains, samples = _fit_of(profile, written)
    fields: dict[str, Any] = {}
    if fitted and trains:
        fields["gradient_checkpointing"] = Commented(fitted.checkpointing, f"counted on each GPU: {fitted.words}")
        fields["max_tokens_per_microbatch"] = Commented(fitted.budget, "tokens that a GPU trains on at once")
    if fitted and samples and fitted.engine:
        meanwhile = "trainers are in CPU memory" if "rl" in written else "nothing trains"
        comment = f"an engine's share of a GPU: weights and key-value cache; {meanwhile} meanwhile"
        fields["gpu_memory_utilization"] = Commented(fitted.engine, comment)
    return fields


def memory_problem(profile: Profile, written: dict[str, Any]) -> list[str]:
    """A sentence if no way to train, or to sample, fits on a GPU."""
    fitted, trains, samples = _fit_of(profile, written)
    if fitted is None or ((fitted.fits or not trains) and (fitted.engine or not samples)):
        return []
    engine = "" if fitted.engine or not samples else ", and an engine as much as its weights and a tenth of a GPU"
    return [
        f"{profile.model.name} does not fit, as it is counted for {profile.machine.words}: {fitted.trained} need "
        f"{fitted.words} on each GPU{engine}; use a smaller model or more GPUs"
    ]


def training(
    profile: Profile, learning_rate: float, scratch: float, tokens: int | None = None, shares: bool = False
) -> dict[str, Any]:
    """Optimiser and schedule. ``scratch`` is the learning rate of a new model. ``tokens``, by default those of the user's rows,
    and ``shares`` are those of :func:`fit`."""
    count, section = profile.rows.count, dict[str, Any]()
    epochs = 1 if count >= 10_000 else 2 if count >= 1_000 else 3
    section["num_train_epochs"] = epochs
    size = 64 if count >= 10_000 else 32 if count >= 1_000 else 16 if count >= 200 else 8
    size = batch(profile, size, epochs * trained_rows(profile))
    section["batch_size"] = Commented(size, f"rows in a step; there are {profile.rows.count_in_words}")
    lora = _lora(profile, given_tokens(profile) if tokens is None else tokens, shares)
    if profile.model.is_scratch:
        section["learning_rate"] = Commented(scratch, f"of a new model; about {learning_rate:g} for a trained one")
    elif lora:
        section["learning_rate"] = Commented(
            float(f"{learning_rate * LORA_RATE:.3g}"), "about ten times that of full training"
        )
    else:
        section["learning_rate"] = Commented(learning_rate, "lower it if the loss jumps")
    in_bf16 = profile.machine.precision and (profile.machine.gpus or not profile.model.is_scratch)
    precision = {"bf16": Commented(True, profile.machine.precision)} if in_bf16 else {}
    if profile.mapping.images and not lora:
        section["train_vision_tower"] = Commented(False, "true also trains what reads the images")
    return {**section, "warmup_ratio": 0.03, **lora, **precision}


def trained_rows(profile: Profile) -> int:
    """The user's rows without those that are held out of them."""
    return max(1, profile.rows.count - (profile.held_out.test_rows or len(profile.held_out.rows)))


def batch(profile: Profile, most: int, rows: int) -> int:
    """The largest power of two, up to ``most``, with which a pretrained model takes enough steps on so many rows in all."""
    if profile.model.is_scratch or profile.mapping.kind == "documents":  # of which each makes one row or many
        return most
    return min(most, 2 ** int(math.log2(max(1, rows // FEW_STEPS))))


def _lora(profile: Profile, tokens: int, shares: bool) -> dict[str, Any]:
    """Adapters, if full training does not fit into this machine's memory."""
    if fitted := fit(profile, tokens, shares):
        in_4_bits = {"load_in_4bit": True} if fitted.trained == "adapters beside 4 bits" else {}
        adapters = Commented(
            {"r": 16, "lora_alpha": 32, **in_4_bits}, f"{profile.machine.words}: all weights do not fit"
        )
        return {} if fitted.trained == "all weights" else {"lora": adapters}
    on_cpu = memory.fit_on_cpu(profile.machine, profile.model, tokens)
    if on_cpu is None or not on_cpu.lora:
        return {}
    needed = on_cpu.needed / GIB
    comment = f"training all weights needs {needed:.0f} GiB; {profile.machine.words} here"
    return {"lora": Commented({"r": 16, "lora_alpha": 32}, comment)}


def evaluation(profile: Profile, answers: int = 1, verifier: bool = True) -> dict[str, Any]:
    """The policy's answers to held-out prompts, before and after training; empty if there are none."""
    if not profile.held_out.prompts:
        return {}
    room, most = answer_room(profile), 200 if profile.machine.gpus or profile.model.is_scratch else 64
    held_out = prompts(profile, [{**source, "rows": most} for source in profile.held_out.prompts], room)
    section: dict[str, Any] = {"prompts": held_out, "generation": generation(answers, room)}
    if profile.rewards:
        section["rewards"] = reward_list(profile)
    if verifier and profile.verifier:
        section["verifier"] = Commented(profile.verifier, "compares answers with the label")
    section["generation"] |= decoding("verifier" in section or "rewards" in section)
    return {"evaluation": section}


def reward_list(profile: Profile) -> list[Any]:
    """The user's reward functions; their sum counts."""
    return [{"function": name} for name in profile.rewards]


def decoding(scored: bool) -> dict[str, Any]:
    """The temperature of an evaluation: greedy for scored answers; otherwise 1, as the KL is estimated from samples."""
    if scored:
        return {
            "temperature": Commented(
                0, "greedy: the likeliest answer; with 1, samples, and the KL to the start is measured"
            )
        }
    return {"temperature": Commented(1, "sampled, so that the KL to the start is measured; 0 is greedy")}


def generation(answers: int, room: int) -> dict[str, Any]:
    """Sampling of policies."""
    return {"num_generations": answers, "max_completion_length": Commented(room, "tokens of an answer")}


def steps(profile: Profile, per_step: int) -> int:
    """Steps that use each prompt about twice, at most 200. At 1e-6 a pretrained model learns little in less than 100: published
    runs have hundreds of updates (TinyZero, Open-R1)."""
    least = 10 if profile.model.is_scratch else 100
    return max(least, min(200, 2 * profile.rows.count // per_step))


def check_verified(profile: Profile, method: str) -> str:
    """The verifier. Raises UserError if the rows have no label that a verifier understands."""
    if profile.verifier is not None:
        return profile.verifier
    column = profile.mapping.columns.get("label")
    reason = f"`{column}` is no number, formula or test of a program" if column else "no column holds a right answer"
    raise UserError(
        f"method {method}: its answers cannot be verified: {reason}; name the column with --column label=NAME"
        + (", or a reward function of yours with --reward file.py:function" if method == "rl" else "")
    )


def reward_model(profile: Profile, tokens: int | None = None) -> dict[str, Any]:
    """The section of a reward model from preference pairs. ``tokens`` are those of :func:`training`."""
    section = training(profile, 1e-5, 1e-3, tokens)
    if not profile.model.is_scratch:
        # Ouyang et al. 2022, InstructGPT, appendix C.2; Touvron et al. 2023, Llama 2, 3.2.2
        section["num_train_epochs"] = Commented(1, "reward models overfit in a second one")
        size = batch(profile, plain(section["batch_size"]), trained_rows(profile))
        section["batch_size"] = Commented(size, f"pairs in a step: {FEW_STEPS} steps or more in all")
    return {"reward_model": {"data": data(profile), "training": section}}


def rounds(profile: Profile, method: str, rates: tuple[float, float], verified: dict[str, Any]) -> dict[str, Any]:
    """The sections of a method that repeats sampling, scoring and training; a verifier scores, or for pairs a reward model.

    ``rates`` are the learning rates of a trained and of a new model; ``verified`` are further fields of `selection` if a
    verifier scores.
    """
    pairs = profile.mapping.kind == "preferences"
    verifier = None if pairs else check_verified(profile, method)
    room = answer_room(profile, least=32 if profile.model.is_scratch else 128)
    tokens = max(sampled_tokens(profile, room, method), given_tokens(profile) if pairs else 0)
    train = training(profile, *rates, tokens)
    per_round = min(10_000 if profile.machine.gpus else 1024, trained_rows(profile))
    if method == "iterative-dpo" and not profile.model.is_scratch:  # a pair of each prompt
        size = batch(profile, plain(train["batch_size"]), per_round)
        train["warmup_ratio"] = 0.1
        train["batch_size"] = Commented(size, f"pairs in a step: {FEW_STEPS} steps or more in a round")
    in_4_bits = "load_in_4bit" in plain(train).get("lora", {})
    once = Commented(1, "a second one would round the weights to 4 bits again, and lose most of what this one learns")
    section: dict[str, Any] = {
        "rounds": once if in_4_bits else 2,
        "prompts": prompts(profile, profile.all_sources, room),
        "prompts_per_round": Commented(per_round, "each round takes the next ones"),
        "generation": generation(8 if profile.machine.gpus else 4, room),
        **({} if pairs else {"selection": {"score": "verifier", **verified}}),
        "training": train,
    }
    measured = evaluation(profile)
    if verifier and not measured:  # the verifier that scores the rounds is a field of `evaluation`
        measured["evaluation"] = {
            "prompts": prompts(profile, profile.sources, room),
            "generation": {**generation(1, room), **decoding(scored=True)},
            "verifier": verifier,
        }
    return {**(reward_model(profile, tokens) if pairs else {}), method.replace("-", "_"): section, **measured}


def promotion(tag: str, method: str, sections: dict[str, Any]) -> dict[str, Any]:
    """The section `promotion`. Its gates require a result better than chance, or no worse than the tag's."""
    gates, content, why = [], plain(sections), TAG
    evaluation = content.get("evaluation")
    if method in TEST_GATES and _holds_out(content[method.replace("-", "_")]):
        gates.append(TEST_GATES[method])
    judge = "reward functions" if evaluation and "rewards" in evaluation else None
    if _holds_out(content.get("reward_model", {})):
        judge = "reward model"
        gate = {"metric": "reward_model_accuracy", "min": 0.55}
        gates.append(Commented(gate, "a reward model that is no better than chance teaches nothing"))
    if evaluation is not None and "verifier" in evaluation:
        gates.append(NOT_WORSE_GATE if gates else ACCURACY_GATE)
    elif evaluation is not None and judge == "reward model":
        why = f"{TAG}; the optimised reward model cannot judge the policy: add another to `evaluation.rewards`, and a gate"
    elif evaluation is not None and judge:
        gates.append(Commented({"metric": "win_rate", "min": 0.5}, f"against the initial policy, by the {judge}"))
    if not gates:
        return {"tag": Commented(tag, f"{TAG}; add `gates` that it must pass")}
    return {"tag": Commented(tag, why), "gates": gates}


def _holds_out(section: dict[str, Any]) -> bool:
    data = section.get("data", {})
    return bool(data.get("test_rows")) or any(source.get("held_out") for source in data.get("sources", ()))
