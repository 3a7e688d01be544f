"""Stage: a process reward model, a language model that scores steps, from completions with labelled steps."""

from __future__ import annotations

import json
from typing import Any

from alignment_core.data.steps import STEPS, verdict_ids
from alignment_core.data.turn_end import chat_template_of
from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageContext
from alignment_core.execution.intermediate_checkpoints import CHECKPOINTS
from alignment_core.execution.packages import TRAINING_PACKAGES, TrainingStageConfig
from alignment_core.execution.training_stages import LAST, train
from alignment_core.models.saving import ADAPTER, write_chat_template
from alignment_core.recipes.sections.process_reward_model import StepsConfig


class ProcessRewardModelStageConfig(TrainingStageConfig):
    """How to train it."""

    steps: StepsConfig


def run(context: StageContext, config: ProcessRewardModelStageConfig) -> dict[str, Any]:
    from alignment_core.data.template import Renderer
    from alignment_core.training.methods.process_reward_model import ProcessRewardModel

    renderer = Renderer(context.model("model").tokenizer())
    verdicts = verdict_ids(renderer, config.steps.verdict_tokens, "process_reward_model.steps.verdict_tokens")
    metrics = train(context, ProcessRewardModel(verdicts, config.training.bf16), config.training)
    content = json.dumps(config.steps.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    chat_template = chat_template_of(context.inputs["data"])
    for name, folder in context.outputs.items():
        if name != ADAPTER and (folder / "config.json").is_file():
            (folder / STEPS).write_text(content)
            if chat_template is not None:  # it reads all conversations as those that it was trained on
                write_chat_template(folder, chat_template)
    if "test_label" in metrics:
        metrics["test_majority"] = max(metrics["test_label"], 1 - metrics["test_label"])
    return metrics


SHOWS = titles("test_accuracy", "accuracy", "loss")
STAGE = Stage(
    "process_reward_model",
    1,
    {
        "process-reward-model": "process-reward-model",
        LAST: "process-reward-model",
        ADAPTER: "adapter",
        CHECKPOINTS: "process-reward-model",
    },
    ProcessRewardModelStageConfig,
    run,
    SHOWS,
    packages=TRAINING_PACKAGES,
)
