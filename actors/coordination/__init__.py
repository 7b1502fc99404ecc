"""The coordinator and what it keeps: rounds, portions, actors, scores."""
