"""YAML parser for recipes: YAML 1.2's plain scalars, and no duplicate keys.

PyYAML reads YAML 1.1, where `1e-4` is a string, `010` is eight, `1:30` is ninety and `no` is false.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from deploy.recipe.validation_errors import shortened

_BOOL, _INT, _FLOAT, _NULL = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null"))
# The core schema, YAML 1.2 section 10.3.2, and `_` between digits.
_RESOLVERS = (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (_FLOAT, r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    (_FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)


class _Loader(yaml.SafeLoader):
    """YAML loader of plain data, which constructs no objects."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own form

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a node's value, with an error if a scalar does not fit its tag (`!!bool maybe`): PyYAML assumes
        that it does."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            tag, value = node.tag.replace("tag:yaml.org,2002:", "!!"), shortened(repr(node.value))
            problem = f"{value} cannot be read as {tag}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping; a duplicate key is an error, where PyYAML keeps the last."""
        seen: set[Hashable] = set()
        if not isinstance(node, yaml.MappingNode):
            # A mapping by its tag alone, which PyYAML refuses.
            return super().construct_mapping(node, deep)
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} comes twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_INT, _construct_int)


def parse_yaml(text: str) -> Any:
    """Return the data of a YAML document. Raises ValueError with one line that says what is wrong and where."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader with fewer types
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ValueError(f"{error.problem}{place}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
