"""The YAML of recipes: numbers of YAML 1.2's core schema, dates as texts, no duplicate fields."""

from __future__ import annotations

import re
from typing import Any

import yaml

from alignment_core.recipes.paths import NumberText

_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
"""YAML 1.2.2, section 10.3.2."""
_YAML_1_1_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_INTEGER_TAG, _FLOAT_TAG = "!core-int", "!core-float"
LARGEST_BITS = 1023
"""Maximum size of an integer: larger ones cannot be converted to floating point."""


class Loader(yaml.SafeLoader):
    """PyYAML's loader, which follows YAML 1.1, with the numbers of YAML 1.2: `1e-3` is a number, `010` is ten, `1_000` and
    `1:30` are texts, and so are dates, which JSON does not have. A number with an exponent and without a dot is a
    :class:`NumberText`, as it may be part of a name.

    PyYAML silently takes the last of duplicate fields; here they are an error, except for fields of merge keys.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _YAML_1_1_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate fields here, because the constructed mapping also has the fields of its merge keys."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"the field {key.value!r} occurs twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        """An integer from decimal, octal (`0o17`) or hexadecimal (`0x1f`) digits."""
        text = str(node.value)
        number = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if number.bit_length() > LARGEST_BITS:
            raise yaml.MarkedYAMLError(problem="the number has too many digits", problem_mark=node.start_mark)
        return number

    def construct_core_float(self, node: yaml.ScalarNode) -> float | NumberText:
        """A number with a dot or an exponent."""
        text = str(node.value)
        if "." not in text:
            return NumberText(text)
        return float(text.replace(".", "", 1) if text.lower().endswith(("inf", "nan")) else text)


for _tag, _pattern, _construct in (
    (_INTEGER_TAG, _INTEGER, Loader.construct_core_int),
    (_FLOAT_TAG, _FLOAT, Loader.construct_core_float),
):
    Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern.pattern})$"), list("-+.0123456789"))
    Loader.add_constructor(_tag, _construct)


MOST_VALUES = 1_000_000
"""Maximum number of fields and items in a recipe with expanded aliases."""


def load(text: str) -> Any:
    """The value of a text. Raises yaml.YAMLError, also for an alias inside its own anchor, for very deep nesting, for a number
    with thousands of digits, and for nested aliases that expand to too many values."""
    try:
        value = yaml.load(text, Loader)
        if _size(value, {}) > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"its aliases stand for more than {MOST_VALUES:,} values")
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from None
    except ValueError as error:  # a number of too many digits
        raise yaml.MarkedYAMLError(problem=str(error)) from None
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Number of values in ``value`` with expanded aliases; ``known`` has 0 for values that are being counted."""
    if not isinstance(value, dict | list):
        return 1
    if known.get(id(value)) == 0:
        raise yaml.MarkedYAMLError(problem="an alias stands inside its own anchor")
    if id(value) not in known:
        known[id(value)] = 0
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(item, known) for item in inner)
    return known[id(value)]
