"""Recipes: YAML parsing, overrides, validation, and their JSON schema."""
