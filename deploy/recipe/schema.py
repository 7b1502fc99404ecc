"""JSON schema of recipes, for editors and for programs that write recipes."""

from __future__ import annotations

from typing import Any

from deploy.recipe.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, with the description of every field."""
    schema = Recipe.model_json_schema()
    # A file without a name takes the file's own, so it is not required.
    schema["required"] = [name for name in schema["required"] if name != "name"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "A d1 recipe"}
