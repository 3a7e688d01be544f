"""Teacher → its log-probabilities of given text, and of the student's own → student → evaluation of both."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, rollout, training
from alignment.tasks.graph import CURRENT, Input, artifact, submit
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes.methods.distillation import DistillationRecipe
from alignment_core.stages.distillation import DistillationStageConfig
from alignment_core.stages.teacher_logps import TeacherLogpsConfig


def distillation(recipe: DistillationRecipe) -> Outputs:
    """Compose the whole recipe."""
    section = recipe.distillation
    base, start = base_and_start(recipe, recipe.sft)
    teacher: Input = data.base_model("teacher", section.teacher.model)
    ours, theirs = artifact(base), artifact(teacher)
    if ours and theirs:
        cure = "name a teacher with the student's tokenizer"
        check_same_tokenizer(CURRENT.get().store, ours, theirs, "distillation.teacher.model", cure)
    if section.teacher.sft:
        demonstrations = data.dataset("teacher/sft/data", section.teacher.sft.data, "demonstrations", teacher)
        sft = section.teacher.sft
        teacher = training.sft(
            "teacher/sft", sft.training, teacher, demonstrations, disable_dropout=sft.disable_dropout
        )

    def learn(label: str, student: Input, text: dict[str, Input], config: DistillationStageConfig) -> Input:
        asked = TeacherLogpsConfig(top_k=section.top_k, bf16=config.training.bf16)
        said = submit("teacher_logps", f"{label}/teacher-logps", asked, {"model": teacher, **text})
        learnt: Input = submit("distillation", label, config, {"model": student, "data": said}, label)
        return learnt

    student = start
    if section.data:
        rows = data.dataset("distillation/data", section.data, "demonstrations", base)
        config = DistillationStageConfig(training=section.training, loss=section.loss)
        student = learn("distillation", student, {"data": rows}, config)
    if own := section.on_policy:
        prompts = data.dataset("distillation/prompts", own.prompts, "prompts", base)
        config = DistillationStageConfig(training=own.training, loss=section.loss)
        for number in range(1, own.rounds + 1):
            label, first = f"distillation/round-{number}", (number - 1) * own.prompts_per_round
            samples = rollout.generate(
                f"{label}/sample", own.generation, student, prompts, first, own.prompts_per_round, label
            )
            student = learn(label, student, {"rollouts": samples}, config)

    evaluations = Evaluations(recipe, base, None)
    before = "sft" if recipe.sft else "start"
    if recipe.evaluation:
        evaluations.add(before, start)
        evaluations.add("teacher", teacher)
        evaluations.add("student", student)
    return Outputs(
        policy=student, report=evaluations.report(), final="student", baseline=before, evaluations=evaluations
    )
