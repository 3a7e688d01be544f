"""A function for each stage, which submits it to the current composition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.composition.graph import Input, Step, current, metrics, submit
from alignment_core.data import kinds as kinds_of_rows
from alignment_core.data.pin import pin
from alignment_core.errors import NumericError, UserError
from alignment_core.evaluation.directions import higher_is_better
from alignment_core.execution.base import StageCall
from alignment_core.execution.curve import NOT_FINITE
from alignment_core.execution.key import stage_seed
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes import (
    DataConfig,
    DpoLossConfig,
    EvaluationConfig,
    GenerationConfig,
    ModelConfig,
    RewardModelConfig,
    RlConfig,
    SelectionConfig,
    TrainingConfig,
)
from alignment_core.recipes.sections.evaluation import OF_TRAINING
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.recipes.sections.lm_eval import LmEvalConfig
from alignment_core.recipes.sections.pairwise_judge import PairwiseJudgeConfig
from alignment_core.recipes.sections.process_reward_model import ProcessRewardModelConfig
from alignment_core.recipes.sections.rejection_sampling import BestConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.resolved_names import known_names, remember
from alignment_core.stages.base_model import in_store, near_tags, pin_model
from alignment_core.stages.best_of_n import BestOfNConfig
from alignment_core.stages.continued_pretraining import ContinuedPretrainingStageConfig
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.stages.dpo import DpoStageConfig
from alignment_core.stages.evaluate import EvaluateConfig
from alignment_core.stages.gain import GainConfig
from alignment_core.stages.generate import GenerateConfig
from alignment_core.stages.judge_pairs import JudgePairsConfig
from alignment_core.stages.kto import KtoStageConfig
from alignment_core.stages.lm_eval import pin_tasks
from alignment_core.stages.merge_adapter import MergeAdapterConfig, pin_adapter
from alignment_core.stages.overlap import HELD_OUT, OverlapConfig
from alignment_core.stages.process_reward_model import ProcessRewardModelStageConfig
from alignment_core.stages.reference_logps import PAIRS, ReferenceLogpsConfig
from alignment_core.stages.report import ReportConfig, decoding_sentence
from alignment_core.stages.reward_model import RewardModelStageConfig
from alignment_core.stages.rl import RESULTS, RlStageConfig
from alignment_core.stages.score import ScoreConfig
from alignment_core.stages.select_best import SelectBestConfig
from alignment_core.stages.select_pairs import SelectPairsConfig
from alignment_core.stages.sft import SftStageConfig
from alignment_core.stages.variants import FailedVariant, Variant, VariantsConfig

# ---------------------------------------------------------------- models and data


def base_model(label: str, model: ModelConfig, kinds: Sequence[str] = ("model",)) -> Step | Reference:
    """The model that the recipe names: an artifact or tag of the store as it is, any other through a stage."""
    store = current().store
    if model.adapter is not None:
        # The merge applies settings of the tokenizer, because the adapter may have its own.
        plain: dict[str, Any] = {"adapter": None, "chat_template_kwargs": {}, "eos_token": None}
        base = base_model(f"{label}/base", model.model_copy(update=plain), kinds)
        named = ModelConfig(name=model.adapter)
        adapter = _named_artifact(named, (ADAPTER,), "model.adapter")
        config = (
            MergeAdapterConfig(adapter=model.adapter)
            if adapter
            else pin_adapter(model.adapter, near_tags(store, named))
        )
        settings = ("chat_template", "chat_template_kwargs", "eos_token")
        config = config.model_copy(update={name: getattr(model, name) for name in settings})
        return submit("merge_adapter", label, config, {"model": base, ADAPTER: adapter}, common_seed=True)
    known = _named_artifact(model, kinds)
    if known is not None:
        return known
    if current().trust_remote_code:  # it is loaded with its code, which is therefore copied, too
        model = model.model_copy(update={"trust_remote_code": True})
    pinned = pin_model(model, near_tags(store, model))
    # Only the weights of a model from scratch depend on the seed.
    return submit("base_model", label, pinned, {}, common_seed=model.scratch is None)


def _named_artifact(model: ModelConfig, kinds: Sequence[str], field: str = "model") -> Reference | None:
    """The artifact of the store that the recipe names: the same one in all attempts of a run, also if a tag moves meanwhile,
    as the run's own promotion moves it."""
    name = f"artifact {model.name}"
    known = known_names().get(name)
    reference = in_store(current().store, model.model_copy(update={"name": known}) if known else model, kinds, field)
    if reference is not None:
        remember(name, str(reference))
    return reference


def dataset(
    label: str,
    data: DataConfig,
    kind: str,
    tokenizer: Input,
    rows: Input | None = None,
    stream: str = "",
    held_out: bool = False,
    settings: Mapping[str, Any] | None = None,
    common_seed: bool = False,
) -> Step:
    """Rows of a recipe's ``data``, or of the artifact ``rows``, as token ids of ``tokenizer`` (a model).

    ``kind`` names a kind of rows (:mod:`alignment_core.data.kinds`). Data sets of one kind draw and shuffle their rows alike,
    unless they name another ``stream``. ``settings`` are options of this kind alone. No stage trains on ``held_out`` rows;
    :func:`overlap` checks whether training data repeats their prompts. With ``common_seed``, branches with seeds of their own
    draw the same rows.
    """
    images = kinds_of_rows.load(kind).takes_images
    config = DatasetConfig(
        data=data,
        sources=() if rows else tuple(pin(source, images) for source in data.sources),
        kind=kind,
        settings=dict(settings or {}),
    )
    inputs = {"tokenizer": tokenizer, "rows": rows}
    stream = stream or kinds_of_rows.stream(kind)
    step = submit("dataset", label, config, inputs, stream, common_seed=common_seed)
    if not held_out:
        current().training_data[label] = step
    return step


def overlap(
    label: str, field: str, held_out: Input, max_overlap: float | None, earlier: Mapping[str, Input] = {}
) -> Step:
    """Compare held-out prompts with all data that stages train on so far, and with data sets of ``earlier`` runs by name.

    ``field`` is the recipe's field with the prompts; if a larger share of them than ``max_overlap`` repeats, the run ends.
    """
    inputs = {HELD_OUT: held_out, **earlier, **current().training_data}
    return submit("overlap", label, OverlapConfig(field=field, max_overlap=max_overlap), inputs)


# ---------------------------------------------------------------- training


def sft(
    label: str,
    training: TrainingConfig,
    model: Input,
    data: Input,
    stream: str = "",
    disable_dropout: bool = True,
    neftune_noise_alpha: float = 0.0,
) -> Step:
    """Fine-tune ``model`` on demonstrations."""
    config = SftStageConfig(training=training, disable_dropout=disable_dropout, neftune_noise_alpha=neftune_noise_alpha)
    return submit("sft", label, config, {"model": model, "data": data}, stream)


def reward_model(label: str, section: RewardModelConfig, model: Input, data: Input) -> Step:
    """Train a reward model that starts from ``model``."""
    fields = section.model_dump(include={"loss_type", "center_rewards_coefficient"})
    config = RewardModelStageConfig(training=section.training, **fields)
    return submit("reward_model", label, config, {"model": model, "data": data})


def dpo(
    label: str,
    training: TrainingConfig,
    loss: DpoLossConfig,
    policy: Input,
    data: Input,
    reference: Input | None = None,
    stream: str = "",
) -> Step:
    """Train ``policy`` on pairs. Default reference, if the loss needs one: the policy before this training."""
    config = DpoStageConfig(training=training, loss=loss)
    if loss.sync_ref_model:
        return submit("dpo", label, config, {"model": policy, "data": data, "reference": reference}, stream)
    logps = None
    if loss.needs_reference:
        logps_label = f"{label.removesuffix('/dpo')}/reference-logps"
        logps = reference_logps(logps_label, "dpo", training, policy, reference, data, stream, ld_alpha=loss.ld_alpha)
    return submit("dpo", label, config, {"model": policy, "data": data, "reference_logps": logps}, stream)


def reference_logps(
    label: str,
    stage: str,
    training: TrainingConfig,
    policy: Input,
    reference: Input | None,
    data: Input,
    stream: str = "",
    completions: tuple[str, ...] = PAIRS,
    mismatched: bool = False,
    ld_alpha: float | None = None,
) -> Step:
    """Log-probabilities of the rows on which a stage of the kind ``stage`` trains, of these columns of ``completions``.

    They are those of ``reference``; default: of ``policy`` before its training. With ``mismatched``, completions of other
    prompts are added, which KTO estimates its KL from; ``ld_alpha`` is LD-DPO's.
    """
    bits = training.base_bits if reference is None else None
    config = ReferenceLogpsConfig(
        bf16=training.bf16,
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        completions=completions,
        mismatched=mismatched,
        ld_alpha=ld_alpha,
    )
    if training.max_steps is not None:  # which may be less than an epoch: then only the rows of these steps are needed
        call = StageCall(stage=stage, label=label, config={}, inputs={}, seed=current().seed, stream=stream)
        steps = {"max_steps": training.max_steps, "batch_size": training.batch_size, "order": stage_seed(call)}
        config = config.model_copy(update=steps)
    return submit("reference_logps", label, config, {"model": policy if reference is None else reference, "data": data})


def kto(
    label: str,
    training: TrainingConfig,
    loss: KtoLossConfig,
    policy: Input,
    data: Input,
    reference: Input | None = None,
    stream: str = "",
) -> Step:
    """Train ``policy`` on labelled completions. Default reference: the policy before this training."""
    config = KtoStageConfig(training=training, loss=loss)
    if loss.sync_ref_model:
        return submit("kto", label, config, {"model": policy, "data": data, "reference": reference}, stream)
    logps = reference_logps(
        f"{label}/reference-logps",
        "kto",
        training,
        policy,
        reference,
        data,
        stream,
        completions=("completion",),
        mismatched=loss.loss_type == "kto",
    )
    return submit("kto", label, config, {"model": policy, "data": data, "reference_logps": logps}, stream)


def continued_pretraining(label: str, training: TrainingConfig, model: Input, data: Input) -> Step:
    """Train ``model`` on every token of documents."""
    config = ContinuedPretrainingStageConfig(training=training)
    return submit("continued_pretraining", label, config, {"model": model, "data": data})


def process_reward_model(label: str, section: ProcessRewardModelConfig, model: Input, tokenizer: Input) -> Step:
    """Train a process reward model that starts from ``model``."""
    layout = section.steps.model_dump(exclude={"verdict_tokens"})
    rows = dataset(f"{label}/data", section.data, "stepwise", tokenizer, settings=layout)
    config = ProcessRewardModelStageConfig(training=section.training, steps=section.steps)
    return submit("process_reward_model", label, config, {"model": model, "data": rows})


def rl(
    label: str,
    section: RlConfig,
    policy: Input,
    prompts: Input,
    reward_models: Mapping[str, Input],
    critic: Input | None,
    pretraining: Input | None,
    held_out: Input | None,
    reference: Input | None = None,
) -> Step:
    """Train a policy by the rewards of its own samples; returns the policy that ``rl.result`` selects.

    ``reward_models`` are the reward models by role (``reward-<number>`` in ``section.rewards``). The critic starts from
    ``critic``, default the policy. ``pretraining`` and ``held_out`` are the data sets of ``section.pretraining`` and
    ``section.best``. ``reference`` is the reference of the KL, default the policy.
    """
    config = RlStageConfig(section=section)
    data = {"prompts": prompts, "pretraining": pretraining, "held_out": held_out}
    inputs = {"policy": policy, "critic": critic, "reference": reference, **data, **reward_models}
    return submit("rl", label, config, inputs).output(RESULTS[section.result])


# ---------------------------------------------------------------- completions


@dataclass(frozen=True)
class Rewards:
    """Rewards of a recipe, and the models that they need."""

    field: str
    """The recipe's field with the list."""
    configs: tuple[RewardConfig, ...]
    models: Mapping[str, Input]
    """Reward models by the stage's input, ``reward-<number in the list>``."""


def generate(
    label: str,
    generation: GenerationConfig,
    policy: Input,
    prompts: Input,
    first_prompt: int = 0,
    count: int | None = None,
    stream: str = "",
    after: Step | None = None,
    own_template: bool = False,
) -> Step:
    """Sample completions of ``count`` prompts from number ``first_prompt`` on, once ``after`` is done.

    Calls of one ``stream`` share their noise. With ``own_template``, the prompts are rendered by the chat template of
    ``policy``, whatever that of their data set is.
    """
    config = GenerateConfig(generation=generation, first_prompt=first_prompt, prompts=count, own_template=own_template)
    return submit("generate", label, config, {"policy": policy, "prompts": prompts}, stream, after=after)


def score(
    label: str,
    rollouts: Input,
    policy: Input,
    rewards: Rewards,
    verifying: EvaluationConfig | None = None,
    reference: Input | None = None,
    across_policies: bool = False,
) -> Step:
    """Score completions of ``policy`` by ``rewards`` and by the verifier of ``verifying``.

    With a ``reference``, its log-probabilities are added, at the temperature and lengths of ``verifying``. With
    ``across_policies``, reward models read plain prompts of policies without a chat template in their own, so that the scores
    can be compared with those of policies that have one.
    """
    config = ScoreConfig(rewards=rewards.configs, field=rewards.field, across_policies=across_policies)
    if verifying is not None:
        rules: dict[str, Any] = {
            name: getattr(verifying, name) for name in ("verifier", "max_failed_rewards", "skip_special_tokens")
        }
        if reference is not None:
            rules["temperature"] = verifying.generation.temperature
            rules["max_completion_length"] = verifying.generation.max_completion_length
        config = config.model_copy(update=rules)
    tokenizer = policy if rewards.configs or not config.skip_special_tokens else None
    inputs = {"rollouts": rollouts, "tokenizer": tokenizer, "reference": reference, **rewards.models}
    return submit("score", label, config, inputs)


def select_pairs(label: str, selection: SelectionConfig, rollouts: Input, scores: Input, stream: str = "") -> Step:
    """Make preference pairs of scored completions."""
    config = SelectPairsConfig(selection=selection)
    return submit("select_pairs", label, config, {"rollouts": rollouts, "scores": scores}, stream)


def select_best(
    label: str,
    selection: BestConfig,
    rollouts: Input,
    scores: Input,
    earlier: Input | None = None,
    may_be_empty: bool = False,
) -> Step:
    """Make demonstrations of the best completions, added to the rows of ``earlier``.

    A stage that keeps none fails, unless it ``may_be_empty``: then read its metric ``new`` before you train on it.
    """
    config = SelectBestConfig(selection=selection, may_be_empty=may_be_empty)
    return submit("select_best", label, config, {"rollouts": rollouts, "scores": scores, "earlier": earlier})


def gain(
    label: str,
    rounds: int,
    kept: Sequence[Input],
    policies: Sequence[str],
    evaluations: Mapping[str, Input],
    metric: str | None,
    min_gain: float | None,
) -> Step:
    """Compare the policies of the rounds so far, which trained on the rows ``kept``; see the stage ``gain``."""
    config = GainConfig(policies=tuple(policies), kept=len(kept), rounds=rounds, metric=metric, min_gain=min_gain)
    inputs = {f"kept-{number}": rows for number, rows in enumerate(kept, start=1)}
    if metric is not None:
        inputs |= {f"policy-{number}": evaluations[label] for number, label in enumerate(policies)}
    return submit("gain", label, config, inputs)


# ---------------------------------------------------------------- evaluation


def judge_pairs(
    label: str, judge: PairwiseJudgeConfig, rollouts: Input, baseline: Input, model: Input | None = None
) -> Step:
    """Let a language model compare completions with those of a baseline; the stage serves ``model``, if given."""
    inputs = {"rollouts": rollouts, "baseline": baseline, "judge": model}
    return submit("judge_pairs", label, JudgePairsConfig(judge=judge), inputs)


def evaluate(
    label: str,
    section: EvaluationConfig,
    scores: Input,
    baseline_scores: Input | None,
    verdicts: Input | None = None,
    tasks: Input | None = None,
    to_origin: Input | None = None,
    prompts: Input | None = None,
    rollouts: Input | None = None,
    baseline_rollouts: Input | None = None,
) -> Step:
    """Metrics of scored completions beside those of a baseline, with the ``verdicts`` of a judge, the results of
    lm-eval's ``tasks``, and the KL of the scores ``to_origin``. With the ``prompts`` of the completions, equal ones count as
    one. With the completions of both policies, ``rollouts`` and ``baseline_rollouts``, equal ones tie."""
    statistics = section.model_dump(include=set(EvaluateConfig.model_fields))
    config = EvaluateConfig(**statistics, samples_all_tokens=section.generation.samples_all_tokens)
    beside = {"baseline_scores": baseline_scores, "verdicts": verdicts, "lm_eval": tasks, "scores_to_origin": to_origin}
    completions = {"rollouts": rollouts, "baseline_rollouts": baseline_rollouts}
    return submit("evaluate", label, config, {"scores": scores, **beside, "prompts": prompts, **completions})


def best_of_n(label: str, rewards: Sequence[str], confidence: float, scores: Input) -> Step:
    """Accuracy of the best of n completions, selected by each of the ``rewards`` in the scores."""
    return submit("best_of_n", label, BestOfNConfig(rewards=tuple(rewards), confidence=confidence), {"scores": scores})


def lm_eval(label: str, section: LmEvalConfig, policy: Input) -> Step:
    """Measure a policy with the library lm-eval."""
    return submit("lm_eval", label, pin_tasks(section), {"model": policy})


def report(
    label: str,
    title: str,
    evaluations: Mapping[str, Input],
    baseline: str,
    reward_model: Input | None,
    overlap: Input,
    against: Mapping[str, str],
    generation: GenerationConfig,
) -> Step:
    """All evaluations of a run in one table, of answers sampled with ``generation``.

    Policies are compared with ``baseline``, or with the policy that ``against`` names for them.
    """
    config = ReportConfig(
        title=title,
        policies=tuple(evaluations),
        baseline=baseline,
        against=dict(against),
        decoding=decoding_sentence(generation),
    )
    return submit("report", label, config, {**evaluations, "reward_model": reward_model, "overlap": overlap})


def variants(
    label: str,
    metric: str,
    fields: Mapping[str, Mapping[str, Any]],
    measuring: Mapping[str, Step],
    failed: Mapping[str, str] = {},
) -> Step:
    """Rank the variants of a sweep, which set these ``fields``, by a ``metric`` of the stages ``measuring`` them.

    Waits for these stages. The table ends with the ``failed`` variants and the reasons; a variant whose metric is not finite
    failed, too. Default metric: the first of OF_TRAINING that all variants have. Raises UserError if a variant lacks the
    metric, NumericError if it is finite for none.
    """
    measured = {name: metrics(step) for name, step in measuring.items()}
    known = {name: _numbers(values) for name, values in measured.items() if values is not None}
    shared = set.intersection(*map(set, known.values())) if known else set()
    metric = metric or next((name for name in OF_TRAINING if name in shared or not known), OF_TRAINING[0])
    if known and metric not in shared:
        without = ", ".join(name for name, values in known.items() if metric not in values)
        raise UserError(
            f"rank_by: {metric!r} was not measured of {without}; all have {', '.join(sorted(shared)) or 'none'}"
        )
    broken = {name: f"{metric} is not finite" for name, values in known.items() if not isfinite(values[metric])}
    if known and broken.keys() == known.keys():
        raise NumericError(f"rank_by: {metric!r} is not finite for any variant")
    failed = {**failed, **broken}
    rows = tuple(
        Variant(
            name=name,
            fields=dict(fields[name]),
            metrics={each: value for each, value in values.items() if isfinite(value)},
        )
        for name, values in known.items()
        if name not in broken
    )
    measuring = {name: step for name, step in measuring.items() if name not in broken}
    lower_is_better = not higher_is_better(metric, next(iter(known.values()), None))
    without_results = tuple(
        FailedVariant(name=name, fields=dict(fields[name]), reason=reason) for name, reason in failed.items()
    )
    config = VariantsConfig(metric=metric, lower_is_better=lower_is_better, variants=rows, failed=without_results)
    return submit("variants", label, config, measuring)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers; NaN for those that are not finite."""
    return {
        name: float(value) if isinstance(value, int | float) else nan
        for name, value in metrics.items()
        if isinstance(value, int | float) or value in NOT_FINITE
    }
