"""The model to start from: a name on the Hub, a local folder, or a small new model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, ValidationInfo, model_validator

from alignment_core.recipes.base import Config, refuses_unused, unkeyed
from alignment_core.recipes.paths import ModelPath

_OF_RENDERING = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now",
    "raise_exception", "true", "false", "none", "True", "False", "None", "and", "or", "not", "in", "is", "if", "else",
    "loop",
})  # fmt: skip
"""Names that `transformers` or Jinja give to something else."""


def _checked_template(template: str, info: ValidationInfo) -> str:
    """The chat template. Raises ValueError for one that writes nothing of a conversation, as a path; stored recipes pass."""
    if "{" not in template and template != "plain" and refuses_unused(info.context):
        raise ValueError(
            f"`chat_template` is the text of a Jinja template, and with {template!r}, which has no {{, all prompts would be "
            "that text: put the text of the file here, or `plain` for no template"
        )
    return template


ChatTemplate = Annotated[str, AfterValidator(_checked_template)]


class ScratchModel(Config):
    """The shape of a randomly initialised model, with a byte-level tokenizer."""

    architecture: Literal["llama", "qwen2"] = "llama"
    """Decoder family, by its `transformers` name."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = Field(3, ge=1)
    """Number of decoder layers."""
    num_attention_heads: int = Field(4, ge=1)
    """Number of attention heads; must divide hidden_size."""
    num_key_value_heads: int | None = Field(None, ge=1)
    """Number of key and value heads. Default: as many as attention heads."""
    max_position_embeddings: int = Field(512, ge=16)
    """Longest sequence in tokens."""
    tie_word_embeddings: bool = True
    """Share the input embedding with the output layer."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ScratchModel:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        return self


class ModelConfig(Config):
    """A base model. A bare string in a recipe stands for ``name``."""

    name: ModelPath | None = None
    """Name on the Hub (`Qwen/Qwen2.5-0.5B-Instruct`), path of a local folder (relative to the
    recipe's file), address of a folder (`s3://bucket/models/base`), or a reference or tag of the store
    (`policy/production`, `model@sha256:…`)."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the head of the main branch, pinned when the run starts."""
    scratch: ScratchModel | None = None
    """Create a new model of this shape instead of loading one."""
    adapter: ModelPath | None = unkeyed(None)
    """LoRA adapter to merge into the model: a folder in `peft`'s format, its address, a name on the Hub, or a reference or tag
    of the store."""
    chat_template: ChatTemplate | None = None
    """Jinja chat template that replaces the tokenizer's own, or `plain` for none; it is saved with every checkpoint."""
    chat_template_kwargs: dict[str, bool | int | float | str] = unkeyed({})
    """Arguments of the chat template, such as `{enable_thinking: false}` of Qwen3. They are written into the template as
    defaults, so that training, sampling, evaluation, agents and served or exported models all render with them. A
    `chat_template` of a data set does not get them."""
    eos_token: str | None = unkeyed(None)
    """Token of the vocabulary that ends a sequence, and a turn that the chat template ends with no token, in place of the
    tokenizer's own (TRL's field of this name); it is saved with every checkpoint. Sampling still stops at the tokens of the
    model's generation_config.json, too."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave off unless you have read that code. The recipe's `model` decides for all
    models of the recipe."""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def shorthands(cls, fields: dict[str, Any], handler: GetJsonSchemaHandler) -> list[dict[str, Any]]:
        return [{"type": "string", "title": "Name"}]

    @model_validator(mode="after")
    def _one_origin(self, info: ValidationInfo) -> ModelConfig:
        if self.adapter is not None and self.scratch is not None:
            raise ValueError(
                "`adapter` belongs to the model that it was trained with: give that model as `name`, not `scratch`"
            )
        if (self.name is None) == (self.scratch is None):
            raise ValueError("give exactly one of `name` (Hub name, folder or reference) and `scratch` (a new model)")
        for name in self.chat_template_kwargs:
            if not name.isidentifier() or name in _OF_RENDERING:
                raise ValueError(
                    f"`chat_template_kwargs`: {name!r} is not the name of an argument that a chat template may define"
                )
        if self.scratch is not None:
            self.refuse_unused(info, ("revision",), "with `scratch`: a new model has none")
        return self
