"""Conditional supervised fine-tuning: attributes of completions, how they are written into prompts, and what is wanted."""

from __future__ import annotations

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rewards import Reward, check_rewards
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.recipes.sections.training import LOOKS, TrainingConfig

FIELD = "conditional_sft"


class AttributeConfig(Config):
    """An attribute of completions."""

    reward: Reward
    """The reward that measures it."""
    bins: int | None = Field(None, ge=2, le=100)
    """Write the number of its quantile, from 0 to `bins` - 1, in place of its value. Values that are equal share a bin, so
    some may stay empty. Default: the value itself."""
    decimals: int = Field(2, ge=0, le=6)
    """Decimal places of the value."""

    def written(self, value: float) -> str:
        """A value, or the number of a bin, as the template takes it."""
        return f"{value:.0f}" if self.bins else f"{value:.{self.decimals}f}"


class ConditionalSftConfig(Config):
    """Sample → measure attributes → fine-tune with them in the prompts."""

    prompts: DataConfig
    """Prompts that the policy answers; `max_length` is that of prompt and answer together."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling parameters."""
    attributes: dict[str, AttributeConfig] = Field(min_length=1)
    """The attributes by name."""
    template: str = ""
    """How prompt and attributes are written: `{prompt}`, and each attribute's name in braces. Default: the prompt, and then, in
    brackets, `name=value` of each."""
    wanted: tuple[dict[str, float], ...] = Field(min_length=1)
    """Values of all attributes (numbers of bins, where there are bins) with which the policy is evaluated. The first are those
    of the result; further ones are evaluated beside it."""
    training: TrainingConfig = TrainingConfig()
    """Optimiser and schedule."""

    @property
    def prompt_template(self) -> str:
        """The template of the training rows."""
        return self.template or "{prompt} [" + " ".join(f"{name}={{{name}}}" for name in self.attributes) + "]"

    def wanted_template(self, values: dict[str, float]) -> str:
        """The template in which the attributes have these values."""
        template = self.prompt_template
        for name, value in values.items():
            template = template.replace("{" + name + "}", self.attributes[name].written(value))
        return template

    @model_validator(mode="after")
    def _fits(self) -> ConditionalSftConfig:
        self.training.refuse_unused(LOOKS, f"in `{FIELD}.training`: the completions hold out no rows")
        for name, attribute in self.attributes.items():
            if not name.isidentifier() or name in ("prompt", "completion"):
                raise ValueError(f"`attributes`: {name!r} cannot name one: use letters, digits and underscores")
            check_rewards([attribute.reward], f"{FIELD}.attributes.{name}.reward", self.prompts, f"{FIELD}.prompts")
            if attribute.reward.normalise != "none":
                raise ValueError(f"`attributes.{name}.reward.normalise`: a value is written as it is: remove it")
            if "{" + name + "}" not in self.prompt_template:
                raise ValueError(f"`template` has no {{{name}}}: add it, or remove the attribute")
        for number, values in enumerate(self.wanted):
            if missing := sorted(self.attributes.keys() ^ values.keys()):
                raise ValueError(
                    f"`wanted.{number}` needs a value of each attribute and of no other: see {missing[0]!r}"
                )
            for name, value in values.items():
                bins = self.attributes[name].bins
                if bins and value not in range(bins):
                    raise ValueError(f"`wanted.{number}.{name}` is {value:g}; the bins are 0 to {bins - 1}")
        DataConfig.model_validate({"path": "rows.jsonl", "prompt_template": self.prompt_template})
        return self
