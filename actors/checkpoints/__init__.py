"""Checkpoints of a run: written whole, and chosen from."""
