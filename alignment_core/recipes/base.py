"""The base of every configuration object: frozen, typed, and closed to unknown fields."""

from __future__ import annotations

import functools
import logging
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from alignment_core.recipes.paths import is_number, number_of

log = logging.getLogger(__name__)

TRUTH_FOR_NUMBER = "truth_for_number"
REFUSE_UNUSED: Mapping[str, Any] = {"refuse_unused": True}
"""Context of a pydantic validation that refuses fields without effect: of recipes that users write, but not of stored ones."""


def refuses_unused(context: Any) -> bool:
    """Whether the context of a validation is :data:`REFUSE_UNUSED`."""
    return bool(context and context.get("refuse_unused"))


def unkeyed(default: Any, **constraints: Any) -> Any:
    """A field that is left out of dumps, and so of stage keys, while it has its default: a version of this project that adds
    such a field finds the cached results of earlier versions. ``constraints`` are those of pydantic's ``Field``."""
    return Field(default, exclude_if=lambda value: value == default, **constraints)


@functools.cache
def _warn_of_old_name(old: str, new: str) -> None:
    """Once in a process, because several checks read the same recipe."""
    log.warning(
        "`%s` of a recipe is now called `%s`: rename it, because the next release refuses the old name", old, new
    )


@dataclass(frozen=True)
class NameOf:
    """Annotation of a text that is one of ``names`` or a name from plug-ins, which are loaded when they are needed."""

    names: tuple[str, ...]
    more: Callable[[], Iterable[str]]

    def choices(self) -> tuple[str, ...]:
        """All allowed names. Raises UserError if a plug-in does not load."""
        return tuple(dict.fromkeys((*self.names, *self.more())))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.choices())}

    def _checked(self, name: str) -> str:
        if name not in self.names and name not in self.choices():
            *most, last = map(repr, self.choices())
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})
        return name


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The configuration class in a type, alone, in a list or in a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_of, typing.get_args(annotation))), None)


def _with_defaults(section: Any, usual: Mapping[str, Any], replaces: Mapping[str, str]) -> tuple[Any, Iterable[str]]:
    """A section with defaults for the fields that it leaves out and does not replace by others, and the names of these."""
    if not isinstance(section, (Config, dict)):
        return section, ()
    given = section.model_fields_set if isinstance(section, Config) else section
    replaced = {replaces.get(field) for field in given}
    missing = {field: value for field, value in usual.items() if field not in {*given, *replaced}}
    if isinstance(section, Config):
        return section.model_copy(update=missing), missing
    return {**section, **missing}, missing


class Config(BaseModel):
    """A section of a recipe. The run form, ``align fields`` and the docs show its field descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    DEFAULTS_BY: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {}
    """Defaults that depend on the value of another field: field → value → name → default. Only for fields that are always in
    dumps, because a default that a dump leaves out would change when it is read again."""

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Old names of fields → present ones. Recipes with old names are valid for one release, stored ones always."""

    FILLED_BY_PLACE: ClassVar[bool] = False
    """Whether fields that are left out of this section have the defaults of the field that holds it."""

    ALTERNATIVES: ClassVar[Mapping[str, str]] = {}
    """Field → the field that it replaces, whose default by place is then left out."""

    def refuse_unused(self, info: ValidationInfo, names: Iterable[str], why: str, cure: str = "leave it out") -> None:
        """Raise ValueError for the first of these fields that is set although it has no effect.

        ``info`` is that of the validation, and ``cure`` tells what to do. Stored recipes, such as those in records, pass.
        """
        for name in names if refuses_unused(info.context) else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"`{name}` has no effect {why}: {cure}")

    @classmethod
    def of_old_names(cls, old: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
        """The fields by present names for fields by old ones; for those whose values have another form now, too.

        ``section`` is the whole content.
        """
        return {cls.RENAMED[name]: value for name, value in old.items()}

    @classmethod
    def _renamed(cls, content: dict[Any, Any], info: ValidationInfo) -> dict[Any, Any]:
        """The content with present names. Raises ValueError if a field is set by both of its names."""
        old = {name: content[name] for name in cls.RENAMED if name in content}
        for name in old:
            if cls.RENAMED[name] in content:
                raise ValueError(
                    f"`{name}` is the old name of `{cls.RENAMED[name]}`, and both are set: remove `{name}`"
                )
            if refuses_unused(info.context):
                _warn_of_old_name(name, cls.RENAMED[name])
        others = {name: value for name, value in content.items() if name not in old}
        return {**others, **cls.of_old_names(old, content)} if old else content

    @classmethod
    def alternatives(cls) -> tuple[type[Config], ...]:
        """The subclasses one of which a field of this type holds; empty if it holds this class itself."""
        return ()

    @classmethod
    def shorthands(cls, fields: dict[str, Any], handler: GetJsonSchemaHandler) -> list[dict[str, Any]]:
        """JSON schemas of shorthands for this object in a recipe.

        ``fields`` is the schema of the object with its fields, and may be extended. Every form that a ``before`` validator
        accepts belongs here, as the run form and Prefect's server know only the schema.
        """
        return []

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(schema)
        others = cls.shorthands(handler.resolve_ref_schema(described), handler)
        return {"anyOf": [described, *others]} if others else described

    @classmethod
    @functools.cache
    def _own_sections(cls) -> Mapping[str, dict[str, Any]]:
        defaults = {name: field.get_default() for name, field in cls.model_fields.items()}
        sections = {name: default for name, default in defaults.items() if isinstance(default, Config)}
        kept = {name: section for name, section in sections.items() if section.FILLED_BY_PLACE}
        own = {
            name: {field: getattr(section, field) for field in section.model_fields_set}
            for name, section in kept.items()
        }
        return {name: fields for name, fields in own.items() if fields}

    @classmethod
    def section_defaults(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Defaults of sections in ``content`` that differ from those of the section's class, such as the learning rate of
        `dpo.training`; for a list of sections, those of each item."""
        return cls._own_sections()

    @model_validator(mode="wrap")
    @classmethod
    def _fill_defaults(cls, content: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Fill fields whose default depends on the place of the section or on another field; they do not count as set.

        Pydantic takes the default of a section only where all of it is left out: without this, `training: {max_steps: 9}` in
        DPO would train with the learning rate of SFT.
        """
        if not isinstance(content, dict):
            return handler(content)
        content = cls._renamed(content, info)
        filled: dict[str, Any] = {}
        for field, defaults in cls.DEFAULTS_BY.items():
            value = content.get(field)
            filled |= defaults.get(value, {}) if isinstance(value, str) else {}
        filled = {name: value for name, value in filled.items() if name not in content}
        sections: dict[str, Any] = {}
        below: dict[str, list[Iterable[str]]] = {}
        for name, usual in cls.section_defaults(content).items():
            replaces = getattr(cls.model_fields[name].get_default(), "ALTERNATIVES", {})
            if isinstance(usual, list):
                pairs = [_with_defaults(item, fields, {}) for item, fields in zip(content[name], usual, strict=True)]
                sections[name] = [section for section, _ in pairs]
            else:
                pairs = [_with_defaults(content.get(name, {}), usual, replaces)]
                sections[name] = pairs[0][0]
            below[name] = [missing for _, missing in pairs]
        model = handler({**content, **filled, **sections})
        model.model_fields_set.difference_update(filled, sections.keys() - content.keys())
        for name, of_each in below.items():
            value = getattr(model, name)
            for section, missing in zip(value if isinstance(value, tuple) else (value,), of_each, strict=True):
                if missing:
                    section.model_fields_set.difference_update(missing)
        return model

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, content: Any) -> Any:
        """Refuse truth values as numbers: pydantic converts ``yes`` to 1."""
        for name, field in cls.model_fields.items() if isinstance(content, dict) else ():
            accepted = {field.annotation, *typing.get_args(field.annotation)}
            if isinstance(content.get(name), bool) and accepted & {int, float} and bool not in accepted:
                raise PydanticCustomError(TRUTH_FOR_NUMBER, "a number is needed", {"field": name})
        return content

    @model_validator(mode="before")
    @classmethod
    def _numbers_with_exponents(cls, content: Any) -> Any:
        """Convert texts such as ``1e3``, which pydantic refuses as integers."""
        if not isinstance(content, dict):
            return content
        numbers = {}
        for name, field in cls.model_fields.items():
            accepted = {field.annotation, *typing.get_args(field.annotation)}
            if is_number(content.get(name)) and accepted & {int, float} and str not in accepted:
                numbers[name] = number_of(content[name])
        return {**content, **numbers}
