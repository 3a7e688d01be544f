"""Fields that hold one of several configuration classes, selected by a key."""

from __future__ import annotations

import difflib
import functools
import operator
from typing import Annotated, Any

from pydantic import Discriminator, GetCoreSchemaHandler, Tag, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from alignment_core.plugins import Group
from alignment_core.recipes.base import refuses_unused


class OneOf:
    """Annotation for a configuration class with subclasses from plug-ins of ``group``: ``Annotated[RewardConfig, OneOf(…)]``.

    The ``config`` of each plug-in is a subclass with a field of the name ``KEY``; a mapping with this key is parsed as that
    subclass. The plug-ins are imported when a class with such a field is defined.
    """

    def __init__(self, group: Group, noun: str) -> None:
        self.group = group
        self.noun = noun

    @functools.cached_property
    def kinds(self) -> dict[str, type[Any]]:
        """The configuration classes of the plug-ins that load, by key; ours first."""
        kinds: dict[str, type[Any]] = {}
        for plugin in self.group.loaded()[0].values():
            kinds.setdefault(plugin.config.KEY, plugin.config)
        return kinds

    def validate(self, content: Any, context: Any = None) -> Any:
        """Raises ValueError if ``content`` has no key of a kind or two, and ValidationError of the selected kind."""
        if isinstance(content, tuple(self.kinds.values())):
            return content
        if not isinstance(content, dict):
            raise ValueError(f"{self.noun} is a mapping with one of {self._listed()}")
        kind = self._named(content)
        return self.kinds[kind].model_validate(self._without_others(kind, content, context), context=context)

    def _named(self, content: dict[str, Any]) -> str:
        named = [key for key in self.kinds if content.get(key)]
        if len(named) == 1:
            return named[0]
        near = [key for name in content for key in difflib.get_close_matches(str(name), self.kinds, n=1)]
        hint = f"; did you mean `{near[0]}`?" if near and not named else ""
        hint += "".join(f"; {problem}" for problem in self.group.loaded()[1] if not named)
        has = f"this has {' and '.join(f'`{key}`' for key in named)}" if named else "this has none"
        raise ValueError(f"{self.noun} needs exactly one of {self._listed()}; {has}{hint}")

    def _without_others(self, kind: str, content: dict[str, Any], context: Any) -> dict[str, Any]:
        """The content without fields of other kinds. Raises ValueError if one of them is set."""
        own = self.kinds[kind].model_fields
        remaining = dict(content)
        for key, other in self.kinds.items():
            for name in other.model_fields.keys() & remaining.keys() - own.keys():
                value, field = remaining.pop(name), other.model_fields[name]
                default = None if field.is_required() else field.get_default(call_default_factory=True)
                if refuses_unused(context) and value and value != default:
                    raise ValueError(f"`{name}` has no effect with `{kind}`: it belongs to `{key}`")
        return remaining

    def _listed(self) -> str:
        return ", ".join(f"`{key}`" for key in self.kinds)

    def _tag(self, content: Any) -> str | None:
        if isinstance(content, dict):
            return next((key for key in self.kinds if content.get(key)), None)
        return next((key for key, config in self.kinds.items() if type(content) is config), None)

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Use the union for schemas and serialisation, and :meth:`validate` for input, so that errors name the field itself."""
        tagged = [Annotated[config, Tag(key)] for key, config in self.kinds.items()]
        union: Any = Annotated[functools.reduce(operator.or_, tagged), Discriminator(self._tag)]

        def validated(content: Any, _inner: Any, info: ValidationInfo) -> Any:
            return self.validate(content, info.context)

        return core_schema.with_info_wrap_validator_function(validated, handler.generate_schema(union))
