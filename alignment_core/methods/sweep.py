"""The method ``sweep``: variants of one recipe that differ in some fields, as branches of one graph, ranked in one table."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, PrivateAttr, ValidationInfo, model_validator

from alignment_core.composition import steps
from alignment_core.composition.branches import Branch, branch, common_labels, sharing
from alignment_core.composition.graph import BranchFailed, Step, failure, metrics
from alignment_core.composition.results import Outputs
from alignment_core.composition.steps import Rewards
from alignment_core.errors import UserError
from alignment_core.recipes.base import refuses_unused
from alignment_core.recipes.load import parse_part, set_field
from alignment_core.recipes.methods import Method, method_of
from alignment_core.recipes.paths import Values
from alignment_core.recipes.recipe import BaseRecipe, needs_samples
from alignment_core.recipes.sections.evaluation import OF_SAMPLES, OF_TRAINING, check_metric

ONE_FOR_ALL = {
    "method": "variants are of one method; `method: comparison` compares several",
    "name": "it changes no result",
    "store": "a run has one store",
    "reuse_across_versions": "it holds for the whole run",
    "resources": "resources change no result, so that all variants would be one",
    "retention": "it holds for the whole run",
    "tracking": "it changes no result",
    "promotion": "one of the variants is promoted",
    "evaluation": "all variants are judged alike",
    "model.trust_remote_code": "it holds for the whole run",
}
"""Why a field cannot vary."""
RANKING = ("accuracy", "reward", "judged_win_rate")
"""Metrics of an evaluation that rank variants, the first that is measured."""
SHARED = set(BaseRecipe.model_fields) - {"method", "name"}
"""Fields of every recipe, which the variants have in common unless they are swept."""
LONGEST_NAME = 80


class SweepRecipe(BaseRecipe):
    """Variants of a recipe → one table of them, best first → promotion of the best."""

    method: Literal["sweep"] = "sweep"
    """Variants of a recipe that differ in some fields."""
    base: dict[str, Any]
    """The recipe that varies, with its own `method`. Fields that every recipe has, such as `model` and `evaluation`, may stand
    beside it instead."""
    sweep: dict[str, tuple[Values, ...]] = Field(min_length=1)
    """Fields of the recipe by their paths, such as `dpo.loss.beta`, with the values of each. Of several fields all
    combinations are tried."""
    rank_by: str = ""
    """Metric by which variants are ranked: one of the evaluation, or `test_accuracy` or `test_loss` of the training's own
    test on held-out rows. Default: `accuracy`, else `reward`, else `judged_win_rate` of the evaluation, else those of the
    training."""
    _variants: dict[str, BaseRecipe] = PrivateAttr(default_factory=dict)

    @classmethod
    def shorthands(cls, fields: dict[str, Any], handler: GetJsonSchemaHandler) -> list[dict[str, Any]]:
        fields["required"] = ["base", "sweep"]  # `name` and `model` may be those of `base`
        return []

    @property
    def variants(self) -> dict[str, BaseRecipe]:
        """The variants as recipes, by name: the values that they differ in."""
        return self._variants

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        """Metrics that every variant measures."""
        measured = [variant.measured_in_training for variant in self._variants.values()]
        return tuple(name for name in measured[0] if all(name in others for others in measured))

    @property
    def fields_of(self) -> dict[str, dict[str, Any]]:
        """The values that each variant sets."""
        return {name: dict(zip(self.sweep, values, strict=True)) for name, values in self._named()}

    @property
    def samples(self) -> bool:
        """Whether a variant samples completions."""
        return any(variant.samples for variant in self._variants.values())

    @property
    def ranks(self) -> str:
        """The metric that ranks the variants; empty if only their training measures one."""
        if self.rank_by or self.evaluation is None:
            return self.rank_by
        return next((name for name in RANKING if self._measured(name)), "")

    @property
    def by_training(self) -> bool:
        """Whether the training's own test on held-out rows ranks the variants, and not their evaluation."""
        return self.evaluation is None or self.ranks in ("", *OF_TRAINING)

    @model_validator(mode="before")
    @classmethod
    def _shared_fields_stand_beside_base(cls, content: Any) -> Any:
        """Fields of every recipe may be given in ``base``; those beside it have precedence."""
        if not isinstance(content, Mapping) or not isinstance(content.get("base"), Mapping):
            return content
        base, beside = dict(content["base"]), dict(content)
        name = base.get("name")
        beside.setdefault("name", f"{name}-sweep" if isinstance(name, str) else "sweep")
        for field in SHARED & base.keys():
            beside.setdefault(field, base.pop(field))
        return {**beside, "base": {name: value for name, value in base.items() if name not in SHARED}}

    @model_validator(mode="after")
    def _evaluation_fits(self) -> SweepRecipe:
        """The recipes of the variants check this: they have the sections that an evaluation and gates refer to."""
        return self

    @model_validator(mode="after")
    def _variants_are_recipes(self, info: ValidationInfo) -> SweepRecipe:
        for path, values in self.sweep.items():
            for field, why in ONE_FOR_ALL.items():
                if path == field or path.startswith(f"{field}."):
                    raise ValueError(f"`sweep`: {path} cannot vary: {why}")
            if len(values) != len({_text(value) for value in values}):
                raise ValueError(f"`sweep`: {path} has the same value twice; remove one")
            if not values:
                raise ValueError(f"`sweep`: {path} has no values; write --sweep {path}=VALUE,VALUE")
        shared = self.model_dump(mode="json", exclude_unset=True, include=SHARED)
        whole = {**shared, "name": self.name, **self.base}  # a variant is its recipe alone, down to its name
        read = self._parsed("base", whole, info).model_dump(mode="json", exclude_unset=True)  # paths are absolute
        for name, values in self._named():
            content: Any = whole
            for path, value in zip(self.sweep, values, strict=True):
                content = set_field(content, path, value, f"sweep: {path}")
            self._variants[name] = self._parsed(f"sweep: {name}", content, info)
        own = {name: read[name] for name in self.base}
        self.base.clear()
        self.base.update(own)
        return self

    @model_validator(mode="after")
    def _something_ranks(self, info: ValidationInfo) -> SweepRecipe:
        if self.rank_by in OF_TRAINING and self.evaluation and not self._is_tested:
            if not refuses_unused(info.context):  # recipes of earlier runs are read
                return self
            raise ValueError(
                f"`rank_by`: {self.rank_by!r} needs held-out rows of the training: hold some out with `test_rows`"
            )
        if self.by_training and not self._is_tested:
            other = "a section `evaluation`"
            if self.evaluation:
                other = "a `verifier`, or name a metric of the evaluation with `rank_by`"
            raise ValueError(
                f"nothing ranks the variants: add {other}, or hold rows out for the training's own test with `test_rows`"
            )
        if self.by_training:
            return self._ranked_by_training()
        if self.rank_by and refuses_unused(info.context):
            try:
                check_metric(self.rank_by, info)
            except ValueError as error:
                raise ValueError(f"`rank_by`: {error}") from None
        if not self._measured(self.ranks):
            if (metric := self.ranks.partition(".")[0]) in OF_SAMPLES:
                raise ValueError(f"`rank_by`: {needs_samples(metric)}")
            raise ValueError(f"`rank_by`: the evaluation does not measure {self.ranks!r}")
        return self

    def _ranked_by_training(self) -> SweepRecipe:
        if self.rank_by and self.rank_by not in OF_TRAINING:
            raise ValueError(
                f"`rank_by`: {self.rank_by!r} needs an `evaluation`; training measures {' and '.join(OF_TRAINING)}"
            )
        return self

    @property
    def _is_tested(self) -> bool:
        """Whether the training of every variant has held-out rows of its own."""
        measured = {name.partition(".")[0] for name in self.measured_in_training}
        return _holds_out(self.base) or not measured.isdisjoint(OF_TRAINING)

    def _measured(self, metric: str) -> bool:
        """Whether the evaluation of a variant has this metric; only the variants' recipes know whether they have rewards."""
        variant = next(iter(self._variants.values()))
        return variant.evaluation is not None and variant._measures(variant.evaluation, metric.partition(".")[0])

    def _parsed(self, where: str, content: dict[str, Any], info: ValidationInfo) -> BaseRecipe:
        recipe = parse_part(content, where, info)
        if method_of(recipe).run is not None or isinstance(recipe, SweepRecipe):
            raise ValueError(f"`base.method`: {recipe.method!r} cannot be swept: it is more than one graph")
        return recipe

    def _named(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Each combination of values with its name, made of the last words of the fields, as many as distinguish them."""
        short, taken = _short(list(self.sweep)), set[str]()
        for values in itertools.product(*self.sweep.values()):
            text = ",".join(f"{name}={_text(value)}" for name, value in zip(short, values, strict=True))
            name = re.sub(r"[^\w.=,+-]+", "-", text)[:LONGEST_NAME]
            while name in taken:
                name += "+"
            taken.add(name)
            yield name, values


def _short(paths: list[str]) -> list[str]:
    def last(path: str, words: int) -> str:
        return ".".join(path.split(".")[-words:])

    words = dict.fromkeys(paths, 1)
    for path in paths:
        while sum(last(other, words[path]) == last(path, words[path]) for other in paths) > 1:
            words[path] += 1
    return [last(path, words[path]) for path in paths]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _holds_out(content: Any) -> bool:
    if isinstance(content, Mapping):
        return bool(content.get("test_rows")) or any(_holds_out(value) for value in content.values())
    return False


def compose(recipe: SweepRecipe) -> Outputs:
    """Compose each variant by its method's own composition, and rank those that do not fail.

    Raises the failure of the first variant if all fail.
    """
    compositions = {name: (variant.seed, _composing(variant)) for name, variant in recipe.variants.items()}
    composed: dict[str, Outputs] = {}
    branches: dict[str, Branch] = {}
    failed: dict[str, BranchFailed] = {}
    with sharing(common_labels(compositions)):
        for name, (seed, compose_variant) in compositions.items():
            with branch(name, seed) as branches[name]:
                try:
                    composed[name] = compose_variant()
                except BranchFailed as error:  # a composition that waits for its stages
                    failed[name] = error
        _check_comparable(recipe.ranks, composed)
        failed |= {name: problem for name in composed if (problem := failure(branches[name].steps.values()))}
        if len(failed) == len(compositions):
            raise next(iter(failed.values()))
        composed = {name: outputs for name, outputs in composed.items() if name not in failed}
        measuring = {name: _measuring(outputs, recipe.by_training) for name, outputs in composed.items()}
        reasons = {name: str(failed[name]) for name in compositions if name in failed}
        table = steps.variants("variants", recipe.ranks, recipe.fields_of, measuring, reasons)
    best = (metrics(table) or {}).get("best") or next(iter(composed))
    return composed[best].model_copy(update={"summary": table})


def _composing(variant: Any) -> Callable[[], Outputs]:
    return lambda: method_of(variant).compose(variant)


def _measuring(outputs: Outputs, by_training: bool) -> Step:
    """The stage whose metrics rank a variant: its evaluation, or its training."""
    if not by_training and outputs.evaluations is not None and outputs.final in outputs.evaluations.steps:
        return outputs.evaluations.steps[outputs.final]
    step: Step | None = outputs.policy if outputs.policy is not None else outputs.reward_model
    if step is None:
        raise UserError("base: it trains nothing, so that there is nothing to rank")
    return step


def _check_comparable(metric: str, composed: dict[str, Outputs]) -> None:
    """Raise UserError if the metric of each variant has another reference: its own reward model, or its own start."""
    name = metric.partition(".")[0]
    evaluations = [
        outputs.evaluations for outputs in composed.values() if outputs.evaluations and outputs.evaluations.section
    ]
    judges = {_reward_models(name, evaluation.rewards) for evaluation in evaluations}
    baselines = {_name(evaluation.baseline[1]) for evaluation in evaluations if evaluation.baseline}
    if len(judges) > 1:
        raise UserError(f"rank_by: every variant has a reward model of its own, so that {metric!r} cannot rank them")
    if name in ("win_rate", "judged_win_rate", *OF_SAMPLES) and len(baselines) > 1:
        raise UserError(
            f"rank_by: {metric!r} compares each variant with a start of its own, so that it cannot rank them"
        )


def _reward_models(metric: str, rewards: Rewards) -> tuple[str, ...]:
    """The reward models that decide a metric of the evaluation."""
    sums = metric in ("reward", "win_rate")
    roles = (
        f"reward-{number}"
        for number, reward in enumerate(rewards.configs)
        if metric == f"reward_{number}" or (sums and reward.weight)
    )
    return tuple(_name(rewards.models[role]) for role in roles if role in rewards.models)


def _name(value: Any) -> str:
    return str(getattr(value, "label", value))


METHOD = Method(SweepRecipe, compose, aliases=("grid", "grid-search", "hyperparameters"))
