"""YAML 1.2 parsing: the types of plain scalars, duplicate keys, and tags."""

from __future__ import annotations

import pytest

from deploy.recipe.yaml_text import parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("010", 10),
        ("+3", 3),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("True", True),
        ("null", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("=", "="),
        (".inf", float("inf")),
        ("'1e-4'", "1e-4"),
        ("runs/a b", "runs/a b"),
    ],
)
def test_scalars_have_yaml_1_2_types(text: str, value: object) -> None:
    parsed = parse_yaml(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_duplicate_keys_of_a_mapping_are_refused() -> None:
    assert parse_yaml("a: {x: 1}\nb: {x: 2}") == {"a": {"x": 1}, "b": {"x": 2}}
    with pytest.raises(ValueError, match="the key x comes twice in line 3"):
        parse_yaml("a:\n  x: 1\n  x: 2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:\n  b: !!bool maybe", "'maybe' cannot be read as !!bool in line 2"),
        ("!!timestamp x", "'x' cannot be read as !!timestamp in line 1"),
        ("!!float ''", "'' cannot be read as !!float in line 1"),
        ("!!int x", "'x' cannot be read as !!int in line 1"),
        ("- !!int " + "9" * 5000, "cannot be read as !!int in line 1"),
        ("[!!bool maybe]", "'maybe' cannot be read as !!bool in line 1"),
        ("!!map [1]", "expected a mapping node, but found sequence in line 1"),
        ("{!!bool maybe: 1}", "'maybe' cannot be read as !!bool in line 1"),
    ],
)
def test_an_invalid_tag_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}$") as refused:
        parse_yaml(text)
    assert len(str(refused.value)) < 200
