"""The method ``conditional-sft``: fine-tuning on the policy's own completions with their attributes in the prompt."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start, reward_model, rewards
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import submit
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.init.text import Commented
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.conditional_sft import FIELD, ConditionalSftConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig
from alignment_core.stages.attributes import AttributesConfig


class ConditionalSftRecipe(BaseRecipe):
    """SFT → completions → their attributes → SFT with these in the prompts → evaluation with the wanted values."""

    SAMPLES: ClassVar[bool] = True
    method: Literal["conditional-sft"] = "conditional-sft"
    """Conditional supervised fine-tuning (SteerLM)."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """A reward model that measures an attribute, with `reward_model: ours`."""
    conditional_sft: ConditionalSftConfig
    """Completions, attributes and training."""

    @model_validator(mode="after")
    def _has_its_rewards(self) -> ConditionalSftRecipe:
        if self.reward_model:
            self.reward_model.check_origin()
        listed = [attribute.reward for attribute in self.conditional_sft.attributes.values()]
        self.check_ours(listed, f"{FIELD}.attributes")
        self.check_used(listed, f"{FIELD}.attributes")
        return self


def compose(recipe: ConditionalSftRecipe) -> Outputs:
    """Compose SFT, completions, attributes, training and the evaluations with the wanted values."""
    section = recipe.conditional_sft
    base, start = base_and_start(recipe, recipe.sft)
    judge = reward_model(recipe.reward_model, base, start)
    prompts = steps.dataset("conditional-sft/prompts", section.prompts, "prompts", base)
    listed = [attribute.reward for attribute in section.attributes.values()]
    measures = rewards("conditional_sft.attributes", listed, judge, "conditional-sft")
    samples = steps.generate("conditional-sft/sample", section.generation, start, prompts)
    scores = steps.score("conditional-sft/judge", samples, start, measures)
    config = AttributesConfig(attributes=section.attributes)
    rows = submit("attributes", "conditional-sft/attributes", config, {"rollouts": samples, "scores": scores})
    labelled = section.prompts.model_copy(update={"prompt_template": section.prompt_template, "test_rows": 0})
    completions = steps.dataset("conditional-sft/data", labelled, "sampled", base, rows=rows)
    policy = steps.sft("conditional-sft", section.training, start, completions)

    evaluations = Evaluations(recipe, base, judge)
    before = "sft" if recipe.sft else "start"
    if recipe.evaluation:
        evaluations.add(before, start)
        for number, values in enumerate(section.wanted, start=1):
            label = "wanted" if number == 1 else f"wanted-{number}"
            held_out = recipe.evaluation.prompts
            template = section.wanted_template(values, held_out.prompt_template)
            data = held_out.model_copy(update={"prompt_template": template})
            evaluations.add(label, policy, prompts=evaluations.dataset(f"{label}/evaluation/prompts", data))
    return Outputs(
        policy=policy,
        reward_model=judge,
        report=evaluations.report(),
        final="wanted",
        baseline=before,
        evaluations=evaluations,
    )


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from prompts with an answer that a verifier compares with."""
    verifier = sections.check_verified(profile, "conditional-sft")
    room = sections.answer_room(profile, least=128)
    correct = {"reward": {"verifier": verifier}, "decimals": 0}
    prompts = sections.prompts(profile, profile.all_sources, room)
    section = {
        "prompts": {
            **prompts,
            "max_length": Commented(prompts["max_length"].value + room, "tokens of prompt and answer"),
        },
        "generation": sections.generation(4, room),
        "attributes": {"correct": Commented(correct, "what the verifier says of each answer")},
        "template": Commented("{prompt} [correct={correct}]", "how it is written into the prompt"),
        "wanted": [Commented({"correct": 1}, "what the trained policy is asked for")],
        "training": sections.training(profile, 1e-5, 1e-3, sections.sampled_tokens(profile, room, "conditional-sft")),
    }
    return {"conditional_sft": section, **sections.evaluation(profile)}


METHOD = Method(
    ConditionalSftRecipe,
    compose,
    aliases=("steerlm", "decision-transformer", "attribute-conditioned"),
    decides={
        "conditional-sft/prompts": "conditional_sft.prompts",
        r"conditional-sft/reward-\d+:.*": "conditional_sft.attributes",
        "conditional-sft/(judge|attributes):.*": "conditional_sft.attributes",
        "conditional-sft/data": "conditional_sft.prompts",
        "conditional-sft/sample": "conditional_sft",
        r"wanted(-\d+)?/evaluation/prompts:.*": "conditional_sft.wanted",
        "conditional-sft": "conditional_sft",
    },
    init=Init(
        kinds=("prompts",),
        sections=init_sections,
        why="prompts with a right answer each, which a verifier can compare with",
    ),
)
