"""Recipe loading: a YAML file with command-line overrides, and one-sentence errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.errors import UserError, os_errors, user_errors
from deploy.recipe.recipe import Recipe
from deploy.recipe.validation_errors import first_problem, shortened
from deploy.recipe.yaml_text import parse_yaml
from learner.algorithms import DEFAULT, METHOD
from rewards.data.encoding import decode_text


def load_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """Load a recipe file with overrides `dotted.key=value` on top; the last override of a key counts.

    A recipe without a name takes its file's. An override of `learner.algorithm` drops the file's settings of its own
    algorithm. Raises UserError if the file cannot be read or is not a recipe.
    """
    data = {"name": path.stem} | _read(path)
    parsed = [(text, *parse_override(text)) for text in overrides]
    for algorithm in [value for _, key, value in parsed if key == "learner.algorithm"][-1:]:
        _drop_algorithm_settings(data, algorithm)
    overridden = {}
    for text, key, value in parsed:
        set_key(data, key, value)
        overridden[key] = text
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        if stale := _stale_fields(error, overridden):
            raise UserError(_other_task(path, data["task"], stale)) from error
        problem, num_more = first_problem(error, Recipe.model_json_schema())
        more = f" ({num_more} more {'problem' if num_more == 1 else 'problems'} after this one)" if num_more else ""
        raise UserError(f"{_place(path, overridden, problem.key)}: {problem.sentence}{more}") from error
    for key, sentence in islice(_unintended_values(data, recipe.model_dump(), ""), 1):
        raise UserError(f"{_place(path, overridden, key)}: {sentence}")
    return recipe


def resolved_yaml(recipe: Recipe) -> str:
    """Return the whole recipe, including defaults, as YAML that loads to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flat_fields(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a recipe by their dotted keys, as in an override."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        is_section = isinstance(value, Mapping) and value
        flat |= flat_fields(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat


def _read(path: Path) -> dict[str, Any]:
    with os_errors(f"cannot read the recipe {path}"), user_errors(ValueError, prefix=f"{path} is not YAML: "):
        data = parse_yaml(decode_text(path.read_bytes()))
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a recipe: it should be a mapping of keys like `task:` and `learner:`")
    return data


def parse_override(text: str) -> tuple[str, Any]:
    """Return key and value of `dotted.key=value`. Raises UserError if the text has another form."""
    key, separator, value = text.partition("=")
    if not separator or not all(key.split(".")):
        raise UserError(f"the override {shortened(text)!r} should have the form key=value, for example learner.lr=1e-4")
    with user_errors(ValueError, prefix=f"the value of the override {shortened(text)!r} is not YAML: "):
        return key, parse_yaml(value)


def set_key(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a value at a dotted key. Raises UserError if one of its parents is not a section."""
    *parents, name = key.split(".")
    section = data
    for index, parent in enumerate(parents):
        # An empty section of the file (`rollout:`) reads as None.
        child = {} if section.get(parent) is None else section[parent]
        if not isinstance(child, dict):
            outer = ".".join(parents[: index + 1])
            raise UserError(f"the override {key} needs {outer} to be a section, and it is {shortened(repr(child))}")
        section[parent] = section = child
    section[name] = value


def _drop_algorithm_settings(data: Mapping[str, Any], algorithm: Any) -> None:
    """Drop the file's algorithm settings if another algorithm is chosen: clip ranges of one do not apply to the
    other."""
    section = data.get("learner")
    if isinstance(section, dict) and section.get("algorithm", DEFAULT) != algorithm:
        for name in METHOD:
            section.pop(name, None)


def _stale_fields(error: ValidationError, overridden: Mapping[str, str]) -> list[str]:
    """Return the task fields of a file that the task of an override does not have."""
    if "task.name" not in overridden:
        return []
    unknown = [detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"]
    fields = [str(name) for section, *_, name in unknown if section == "task"]
    return [field for field in fields if f"task.{field}" not in overridden]


def _other_task(path: Path, task: Mapping[str, Any], stale: Sequence[str]) -> str:
    """Return the error for a task override on top of another task's fields."""
    kept = {field: value for field, value in task.items() if field not in stale}
    section = yaml.safe_dump(kept, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf).strip()
    return (
        f"the override task.name={kept['name']}: {path} sets {', '.join(f'task.{field}' for field in stale)}, which "
        f"{kept['name']} does not have; give the section as a whole: 'task={section}'"
    )


def _place(path: Path, overridden: Mapping[str, str], key: str) -> str:
    """Return where a key was written: the file or an override."""
    for overridden_key, text in overridden.items():
        if key == overridden_key or key.startswith((f"{overridden_key}.", f"{overridden_key}[")):
            return f"the override {shortened(text)}"
    inside = [text for overridden_key, text in overridden.items() if overridden_key.startswith(f"{key}.")]
    if len(inside) == 1:
        return f"the override {shortened(inside[0])}"
    return f"{path} with its overrides" if inside else str(path)


def _unintended_values(given: Any, read: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield mistakes that pydantic accepts: `true` as the number 1, and numbers that are not finite."""
    if isinstance(read, float) and not math.isfinite(read):
        yield key, f"{key} is {given}; it should be a finite number"
    if isinstance(given, bool) and not isinstance(read, bool):
        yield key, f"{key} is {str(given).lower()}; it should be a number"
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            yield from _unintended_values(value, read[name], f"{key}.{name}" if key else name)
    elif isinstance(given, list) and isinstance(read, list | tuple):
        for index, (value, read_value) in enumerate(zip(given, read, strict=True)):
            yield from _unintended_values(value, read_value, f"{key}[{index}]")
