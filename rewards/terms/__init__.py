"""Reward terms that a recipe can add to a task's reward."""
