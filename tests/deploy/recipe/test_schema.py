"""The recipe's JSON schema agrees with the code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.recipe.overrides import load_recipe, resolved_yaml
from deploy.recipe.recipe import recipe_schema


def _errors(recipe: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(recipe_schema()).iter_errors(recipe)]


def test_it_is_a_valid_json_schema() -> None:
    """Does not raise SchemaError."""
    jsonschema.Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("task", ["countdown", "sudoku", "sums"])
def test_the_schema_accepts_every_resolved_recipe(task: str, recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, [f"task.name={task}", "learner.advantage=group_z"])
    assert _errors(yaml.safe_load(resolved_yaml(recipe))) == []


def test_the_schema_accepts_files_without_a_name_and_rejects_unknown_keys(recipe_file: Path) -> None:
    recipe = yaml.safe_load(recipe_file.read_text().replace("1e-", "1.0e-"))
    assert _errors(recipe) == []
    assert _errors(recipe | {"sede": 1})
    assert _errors(recipe | {"task": {"name": "chess"}})


def test_the_schema_accepts_every_shipped_recipe() -> None:
    for path in sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml")):
        assert _errors(yaml.safe_load(path.read_text(encoding="utf-8"))) == [], path


def test_every_field_is_described() -> None:
    schema = recipe_schema()
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        for name, field in section.get("properties", {}).items():
            # A section is described where it is defined.
            target = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
            assert "description" in field or "description" in target, name


def test_the_command_prints_the_schema(d1: Callable) -> None:
    assert json.loads(d1("schema").out) == recipe_schema()


def test_its_help_says_how_to_configure_an_editor(d1: Callable) -> None:
    assert "# yaml-language-server: $schema=" in d1("schema", "--help").out
