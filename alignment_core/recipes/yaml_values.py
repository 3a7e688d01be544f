"""YAML as recipes are written in it: numbers of YAML 1.2's core schema, dates as texts, and no field twice."""

from __future__ import annotations

import re
from typing import Any

import yaml

from alignment_core.recipes.numbers import NumberText

_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
"""YAML 1.2.2, section 10.3.2."""
_OF_OLD = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_INTEGER_TAG, _FLOAT_TAG = "!core-int", "!core-float"
LARGEST_BITS = 1023
"""Of a whole number: larger ones are no floating-point numbers."""


class Loader(yaml.SafeLoader):
    """PyYAML's loader, which follows YAML 1.1, with the numbers of 1.2: `1e-3` is one, `010` is ten, `1_000` and `1:30` are
    texts, and so are dates, which JSON does not have. A number with an exponent and without a dot is a :class:`NumberText`, as
    it may be part of a name.

    Of a field that occurs twice PyYAML silently takes the last; here it is an error. Fields of merge keys do not count.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OF_OLD]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The fields as they are written: once it is constructed, a mapping has those of its merge keys, too."""
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
        """Of a decimal, octal (`0o17`) or hexadecimal (`0x1f`) number."""
        text = str(node.value)
        number = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if number.bit_length() > LARGEST_BITS:
            raise yaml.MarkedYAMLError(problem="the number has too many digits", problem_mark=node.start_mark)
        return number

    def construct_core_float(self, node: yaml.ScalarNode) -> float | NumberText:
        """Of a number with a dot or an exponent."""
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
"""Fields and items of a recipe in which each alias is written out."""


def load(text: str) -> Any:
    """The value of a text. Raises yaml.YAMLError, also for a value that no recipe can have: an alias inside its own anchor,
    nesting without end, a number of thousands of digits, aliases of aliases that stand for too much."""
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
    """Values inside ``value``, with those of aliases counted at each place; ``known`` has 0 for those under way."""
    if not isinstance(value, dict | list):
        return 1
    if known.get(id(value)) == 0:
        raise yaml.MarkedYAMLError(problem="an alias stands inside its own anchor")
    if id(value) not in known:
        known[id(value)] = 0
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(one, known) for one in inner)
    return known[id(value)]
