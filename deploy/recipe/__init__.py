"""Recipes: read, composed, checked against each other and against the machine."""
