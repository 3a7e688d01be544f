"""Stage: evaluations of a run's policies → a report as JSON and Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from alignment_core.evaluation.files import HELD_OUT
from alignment_core.evaluation.metric_names import OF_POLICIES
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.stages import overlap


class ReportConfig(StageConfig):
    """The content of the report. Inputs are the evaluations, the ``overlap`` of their prompts with the training data, and the
    ``reward_model`` if there is one."""

    title: str
    policies: tuple[str, ...]
    """Labels in order; each is the role of an input."""
    baseline: str
    """The policy that the others are compared with."""
    against: dict[str, str] = {}
    """The other policy, for policies that are not compared with the baseline."""
    decoding: str = ""
    """A sentence about sampling."""


def run(context: StageContext, config: ReportConfig) -> dict[str, Any]:
    policies = {label: json.loads((context.inputs[label] / "metrics.json").read_text()) for label in config.policies}
    notes = _notes(context)
    shared = json.loads((context.inputs["overlap"] / overlap.FILE).read_text())
    content = {
        "title": config.title,
        "baseline": config.baseline,
        "against": config.against,
        "decoding": config.decoding,
        "notes": notes,
        "policies": policies,
        "overlap": shared,
    }
    (context.output / "report.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (context.output / "report.md").write_text(markdown(content, list(config.policies)))
    return {"policies": policies, "overlap": shared["overlap"], **notes}


def _notes(context: StageContext) -> dict[str, float]:
    """Single numbers that belong beside the table."""
    if "reward_model" not in context.inputs or not (context.inputs["reward_model"] / HELD_OUT).is_file():
        return {}
    held_out = json.loads((context.inputs["reward_model"] / HELD_OUT).read_text())
    return {"reward model, held-out accuracy": held_out["test_accuracy"]} if "test_accuracy" in held_out else {}


def markdown(content: dict[str, Any], order: list[str]) -> str:
    """The report as a Markdown table, one row per policy."""
    shown = columns_of(content["policies"])
    lines = [f"# {content['title']}", ""]
    lines.append("| policy | " + " | ".join(title for _, title in shown) + " |")
    lines.append("|---" * (len(shown) + 1) + "|")
    for label in order:
        metrics = content["policies"][label]
        lines.append(f"| {label} | " + " | ".join(cell(metrics, name) for name, _ in shown) + " |")
    level = confidence(content["policies"])
    others = "".join(f", in the row '{label}' against {other}" for label, other in sorted(content["against"].items()))
    lines += [
        "",
        f"Win rates are against {content['baseline']}{others}. Intervals are at {level}, over n prompts: Wilson's for "
        "accuracy, pass@k and win rates, bootstrap for rewards, KL and tokens.",
    ]
    if content.get("decoding"):
        lines += ["", content["decoding"]]
    lines += [f"\n{sentence}" for label in order for sentence in left_out(label, content["policies"][label])]
    if content["overlap"]["overlap"]:
        lines += ["", f"**{overlap.sentence(**content['overlap'])}.**", ""]
    lines += [f"- {name}: {value:.4g}" for name, value in sorted(content["notes"].items())]
    return "\n".join(lines) + "\n"


def decoding_sentence(generation: GenerationConfig) -> str:
    """A sentence about the sampling of an evaluation."""
    each = f"{generation.num_generations} for each prompt" if generation.num_generations > 1 else "one for each prompt"
    if generation.temperature == 0:
        return f"Answers are greedy (temperature 0), {each}."
    limits = {"top_p": generation.top_p, "top_k": generation.top_k, "min_p": generation.min_p}
    unused = {"top_p": 1, "top_k": 0, "min_p": 0}
    beside = "".join(f", {name} {value:g}" for name, value in limits.items() if value != unused[name])
    return f"Answers are sampled at temperature {generation.temperature:g}{beside}, {each}."


def left_out(label: str, metrics: Mapping[str, float]) -> list[str]:
    """Sentences about completions and pairs that the metrics of a policy do not include."""
    sentences = []
    if failed := metrics.get("failed_rewards"):
        total = f" of {metrics['completions']:.0f}" if "completions" in metrics else ""
        sentences.append(f"{label}: {failed:.0f}{total} completions without a reward or score are left out.")
    if failed := metrics.get("unjudged_pairs"):
        sentences.append(
            f"{label}: {failed:.0f} of {metrics['pairs']:.0f} pairs without a verdict of the judge are left out."
        )
    return sentences


def columns_of(policies: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """Names and titles of the metrics that a table of these policies shows."""
    measured = {name for metrics in policies.values() for name in metrics}
    passes = sorted((name for name in measured if re.fullmatch(r"pass@\d+", name)), key=lambda name: int(name[5:]))
    tasks = sorted(name for name in measured if re.fullmatch(r"lm_eval/[^/]+/[^.]+", name))
    *before, length = OF_POLICIES
    others = [(name, name.removeprefix("lm_eval/")) for name in (*passes, *tasks)]
    return [(name, title) for name, title in (*before, *others, length) if name in measured]


def confidence(policies: Mapping[str, Mapping[str, float]]) -> str:
    """The level of the intervals, such as ``95 %``."""
    levels = sorted({metrics["confidence"] for metrics in policies.values()})
    return " and ".join(f"{100 * level:.4g} %" for level in levels)


def cell(metrics: dict[str, float], name: str) -> str:
    """``0.710 [0.680, 0.740] n=384``, where n is the number of prompts; a dash if it was not measured or is not finite."""
    if metrics.get(name) is None:
        return "—"
    if f"{name}.low" not in metrics:
        return f"{metrics[name]:.3f}"
    ends = f"[{metrics[f'{name}.low']:.3f}, {metrics[f'{name}.high']:.3f}]"
    count = f" n={metrics[f'{name}.n']:.0f}" if f"{name}.n" in metrics else ""  # ledgers of earlier versions have none
    return f"{metrics[name]:.3f} {ends}{count}"


STAGE = Stage("report", 1, {"report": "report"}, ReportConfig, run)
