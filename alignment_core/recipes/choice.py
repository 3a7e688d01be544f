"""A field of a recipe that holds one of several configuration objects, told apart by the key that names each."""

from __future__ import annotations

import difflib
import functools
import operator
from typing import Annotated, Any

from pydantic import Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema

from alignment_core.plugins import Group
from alignment_core.recipes.base import REFUSES_UNUSED


class OneOf:
    """Annotates a configuration class of which the plug-ins of ``group`` bring kinds: ``Annotated[RewardConfig, OneOf(…)]``.

    Each plug-in has a ``config``, a subclass with a field of the name ``KEY``. A mapping is of the kind whose key it has. The
    plug-ins are imported when a configuration object with such a field is defined.
    """

    def __init__(self, group: Group, what: str) -> None:
        self.group, self.what = group, what

    @functools.cached_property
    def kinds(self) -> dict[str, type[Any]]:
        """The configuration objects of the plug-ins that load, by their keys; ours first."""
        found: dict[str, type[Any]] = {}
        for plugin in self.group.loaded()[0].values():
            found.setdefault(plugin.config.KEY, plugin.config)
        return found

    def validate(self, content: Any, _: Any = None) -> Any:
        """Raises ValueError where ``content`` names no kind, or two, and ValidationError of the kind that it names."""
        if isinstance(content, tuple(self.kinds.values())):
            return content
        if not isinstance(content, dict):
            raise ValueError(f"{self.what} is a mapping with one of {self._listed()}")
        kind = self._named(content)
        return self.kinds[kind].model_validate(self._without_others(kind, content))

    def _named(self, content: dict[str, Any]) -> str:
        named = [key for key in self.kinds if content.get(key)]
        if len(named) == 1:
            return named[0]
        near = [one for name in content for one in difflib.get_close_matches(str(name), self.kinds, n=1)]
        hint = f"; did you mean `{near[0]}`?" if near and not named else ""
        hint += "".join(f"; {problem}" for problem in self.group.loaded()[1] if not named)
        has = f"this has {' and '.join(f'`{one}`' for one in named)}" if named else "this has none"
        raise ValueError(f"{self.what} needs exactly one of {self._listed()}; {has}{hint}")

    def _without_others(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """The content without fields of other kinds; raises ValueError where one of these is set."""
        own, left = self.kinds[kind].model_fields, dict(content)
        for key, other in self.kinds.items():
            for name in other.model_fields.keys() & left.keys() - own.keys():
                value, field = left.pop(name), other.model_fields[name]
                default = None if field.is_required() else field.get_default(call_default_factory=True)
                if REFUSES_UNUSED.get() and value and value != default:
                    raise ValueError(f"`{name}` has no effect with `{kind}`: it belongs to `{key}`")
        return left

    def _listed(self) -> str:
        return ", ".join(f"`{key}`" for key in self.kinds)

    def _tag(self, content: Any) -> str | None:
        if isinstance(content, dict):
            return next((key for key in self.kinds if content.get(key)), None)
        return next((key for key, config in self.kinds.items() if type(content) is config), None)

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The union is what is described and written; what is given is told apart here, so that an error's place is the
        field's own."""
        tagged = [Annotated[config, Tag(key)] for key, config in self.kinds.items()]
        union: Any = Annotated[functools.reduce(operator.or_, tagged), Discriminator(self._tag)]
        return core_schema.no_info_wrap_validator_function(self.validate, handler.generate_schema(union))
