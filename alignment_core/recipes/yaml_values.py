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
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

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


def load(text: str) -> Any:
    """The value of a text. Raises yaml.YAMLError."""
    return yaml.load(text, Loader)
