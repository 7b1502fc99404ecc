"""Generator of the reference of recipe fields in docs/recipes.md, below its marker line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.recipe.recipe import recipe_schema

PAGE = Path(__file__).parent / "recipes.md"
MARK = "<!-- Below this line `make docs` writes. -->\n"

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "array": "list",
    "object": "section",
}
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def page(text: str) -> str:
    """Replace the generated tables in the page `text`."""
    head, mark, _ = text.partition(MARK)
    schema = recipe_schema()
    return head + mark + "".join(_section(schema, schema, "", "The run"))


def _section(schema: dict[str, Any], node: dict[str, Any], prefix: str, title: str) -> Iterator[str]:
    """Generate the table of a section's fields, then those of its subsections."""
    rows, sections = [], []
    for name, field in node["properties"].items():
        target = _resolve(schema, field)
        if "properties" in target:
            sections.append((f"{prefix}{name}", target))
        elif "oneOf" in target:
            sections += [(f"{prefix}{name}", _resolve(schema, choice)) for choice in target["oneOf"]]
        elif "patternProperties" in target:
            (of_any_name,) = target["patternProperties"].values()
            sections += [(f"{prefix}{name}.NAME", _resolve(schema, choice)) for choice in of_any_name["oneOf"]]
        else:
            # An enumeration's schema describes the type. The field's description overrides it.
            rows.append(_row(f"{prefix}{name}", target | field, is_required=name in node.get("required", [])))
    if rows:
        description = f"{_one_line(node['description'])}\n\n" if prefix else ""
        yield f"\n## {title}\n\n{description}| field | value | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"
    for key, section in sections:
        kinds = [(tag, section["properties"].get(tag, {}).get("const")) for tag in ("name", "kind")]
        which = "".join(f" with `{tag}: {constant}`" for tag, constant in kinds if constant)
        yield from _section(schema, section, f"{key}.", f"`{key}`{which}")


def _resolve(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    # An optional section is a choice between its schema and null.
    field = next((choice for choice in field.get("anyOf", ()) if "$ref" in choice), field)
    target: dict[str, Any] = schema["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
    return target


def _row(key: str, field: dict[str, Any], *, is_required: bool) -> str:
    default = "required" if is_required else f"`{json.dumps(field.get('default'))}`"
    default = "the file's name" if key == "name" else default.replace("`null`", "none")
    return f"| `{key}` | {_value(field)} | {default} | {_one_line(field['description'])} |\n"


def _value(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        field = next(choice for choice in field["anyOf"] if choice.get("type") != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{choice}`" if isinstance(choice, str) else json.dumps(choice) for choice in field["enum"])
    limits = [f"{sign} {field[name]:g}" for name, sign in _LIMITS.items() if name in field]
    kind = "path" if field.get("format") == "path" else _TYPES[field["type"]]
    return ", ".join([kind, *limits])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
