"""Conditional supervised fine-tuning: attributes of completions, their place in prompts, and the wanted values."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.data import PROMPT, DataConfig, with_parts
from alignment_core.recipes.sections.rewards import Reward, check_rewards
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.recipes.sections.training import EVALUATION_FIELDS, TrainingConfig

FIELD = "conditional_sft"
_OF_ROWS = ("prompt", "completion", "completion_ids", "tools")
"""Columns of the rows beside the attributes."""


class AttributeConfig(Config):
    """An attribute of completions."""

    reward: Reward
    """The reward that measures it."""
    bins: int | None = Field(None, ge=2, le=100)
    """Write the number of the value's quantile, from 0 to `bins` - 1, instead of the value. Equal values share a bin, so
    some bins may be empty. Default: the value itself."""
    decimals: int = Field(2, ge=0, le=6)
    """Decimal places of the value."""

    def written(self, value: float) -> str:
        """The text of a value, or of the number of a bin."""
        return f"{value:.0f}" if self.bins else f"{value:z.{self.decimals}f}"  # z: -0.001 is "0.00"


class ConditionalSftConfig(Config):
    """Sample → measure attributes → fine-tune with them in the prompts."""

    prompts: DataConfig
    """Prompts for the policy; `max_length` limits prompt and answer together."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling parameters."""
    attributes: dict[str, AttributeConfig] = Field(min_length=1)
    """The attributes by name."""
    template: str = ""
    """Template of prompt and attributes: `{prompt}`, and each attribute's name in braces. Default: the prompt, followed by
    `name=value` of each attribute in brackets."""
    wanted: tuple[dict[str, float], ...] = Field(min_length=1)
    """Values of all attributes (numbers of bins, with `bins`) for the evaluation of the policy. The first set of values
    gives the result; further ones are evaluated beside it."""
    training: TrainingConfig = TrainingConfig(warmup_ratio=0.03)
    """Optimiser and schedule."""

    @property
    def prompt_template(self) -> str:
        """The template of the training rows."""
        return self.template or "{prompt} [" + " ".join(f"{name}={{{name}}}" for name in self.attributes) + "]"

    def wanted_template(self, values: dict[str, float], prompt_template: str | None = None) -> str:
        """The template in which the attributes have these values, around the prompts' own ``prompt_template``."""
        written = {name: self.attributes[name].written(value) for name, value in values.items()}
        return with_parts(self.prompt_template, {PROMPT: prompt_template or f"{{{PROMPT}}}", **written})

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> ConditionalSftConfig:
        self.training.refuse_unused(info, EVALUATION_FIELDS, f"in `{FIELD}.training`: the completions hold out no rows")
        for name, attribute in self.attributes.items():
            if name in _OF_ROWS:
                raise ValueError(f"`attributes`: {name!r} cannot name one: the rows have another column of this name")
            if not name.isidentifier():
                raise ValueError(f"`attributes`: {name!r} cannot name one: use letters, digits and underscores")
            check_rewards([attribute.reward], f"{FIELD}.attributes.{name}.reward", self.prompts, f"{FIELD}.prompts")
            if attribute.reward.normalise != "none":
                raise ValueError(f"`attributes.{name}.reward.normalise`: values are not normalised: remove it")
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
