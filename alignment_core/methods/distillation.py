"""The method ``distillation``: a student learns a larger model's probabilities of given text, and of its own completions."""

from __future__ import annotations

from typing import Any, Literal

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start, fine_tuned
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import Input, artifact, current, submit
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.init.models import DEFAULT_MODEL, DEFAULT_ON_GPUS
from alignment_core.init.text import Commented
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.distillation import DistillationConfig
from alignment_core.recipes.sections.training import SftConfig
from alignment_core.stages.distillation import DistillationStageConfig
from alignment_core.stages.teacher_logps import TeacherLogpsConfig


class DistillationRecipe(BaseRecipe):
    """Teacher → its log-probabilities of text → student → evaluation of both → promotion."""

    method: Literal["distillation"] = "distillation"
    """Distillation of a teacher into `model`, the student."""
    sft: SftConfig | None = None
    """Fine-tune the student on demonstrations first."""
    distillation: DistillationConfig
    """The teacher, the text and training."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        section = self.distillation
        last = section.data is not None and section.on_policy is None  # rounds hold out no rows
        measured = section.training.measured(section.data, "test_loss") if last and section.data else ()
        return (*super().measured_in_training, *measured)

    @property
    def samples(self) -> bool:
        """The student answers prompts."""
        return self.evaluation is not None or self.distillation.on_policy is not None


def compose(recipe: DistillationRecipe) -> Outputs:
    """Compose the teacher, the rounds of the student, and the evaluation of both."""
    section = recipe.distillation
    base, start = base_and_start(recipe, recipe.sft)
    teacher: Input = steps.base_model("teacher", section.teacher.model)
    student_model, teacher_model = artifact(base), artifact(teacher)
    if student_model and teacher_model:
        cure = "name a teacher with the student's tokenizer"
        check_same_tokenizer(current().store, student_model, teacher_model, "distillation.teacher.model", cure)
    if section.teacher.sft:
        teacher = fine_tuned("teacher/sft", section.teacher.sft, teacher, teacher)

    def learn(label: str, student: Input, text: dict[str, Input], config: DistillationStageConfig) -> Input:
        teaching = TeacherLogpsConfig(top_k=section.top_k, bf16=config.training.bf16)
        # The base, because the student of every round has its embeddings.
        inputs: dict[str, Input] = {"model": teacher, "student": base, **text}
        logps = submit("teacher_logps", f"{label}/teacher-logps", teaching, inputs)
        return submit("distillation", label, config, {"model": student, "data": logps}, label)

    student = start
    if section.data:
        rows = steps.dataset("distillation/data", section.data, "demonstrations", base)
        config = DistillationStageConfig(training=section.training, loss=section.loss)
        student = learn("distillation", student, {"data": rows}, config)
    if own := section.on_policy:
        prompts = steps.dataset("distillation/prompts", own.prompts, "prompts", base)
        config = DistillationStageConfig(training=own.training, loss=section.loss)
        for number in range(1, own.rounds + 1):
            label, first = f"distillation/round-{number}", (number - 1) * own.prompts_per_round
            samples = steps.generate(
                f"{label}/sample", own.generation, student, prompts, first, own.prompts_per_round, label
            )
            student = learn(label, student, {"rollouts": samples}, config)

    before = "sft" if recipe.sft else "start"
    return Evaluations(recipe, base).outputs({before: start, "teacher": teacher, "student": student})


TEACHERS = {DEFAULT_MODEL: "HuggingFaceTB/SmolLM2-360M-Instruct", DEFAULT_ON_GPUS: "Qwen/Qwen2.5-1.5B-Instruct"}
"""Larger models of the families of the usual students, with their tokenizers."""


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from demonstrations, on which a larger model is the teacher."""
    teacher: Any = TEACHERS.get(profile.model.name, profile.model.name)
    if profile.model.is_scratch:
        teacher = {"scratch": {"hidden_size": 128, "num_hidden_layers": 3}}
    section = {
        "teacher": {"model": Commented(teacher, "a larger model with the student's tokenizer: put yours here")},
        "data": sections.data(profile),
        "training": sections.training(profile, 1e-5, 1e-3),
    }
    return {"distillation": section, **sections.evaluation(profile)}


METHOD = Method(
    DistillationRecipe,
    compose,
    aliases=("gkd", "knowledge-distillation", "minillm"),
    decides={
        "teacher": "distillation.teacher.model",
        r"teacher/sft(/data)?": "distillation.teacher.sft",
        "distillation/data": "distillation.data",
        "distillation/prompts": "distillation.on_policy.prompts",
        r"distillation(/round-\d+)?/teacher-logps": "distillation",
        r"distillation/round-\d+/sample:prompts": "distillation.on_policy.prompts_per_round",
        r"distillation/round-\d+/sample:first_prompt": "the first prompt",
        r"distillation/round-\d+/sample": "distillation.on_policy",
        r"distillation/round-\d+": "distillation.on_policy",
        "distillation": "distillation",
    },
    init=Init(
        kinds=("demonstrations",),
        sections=init_sections,
        why="prompts with answers, on which a student learns a teacher's probabilities",
    ),
)
