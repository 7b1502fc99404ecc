"""Checkpoints of a run: atomic writing, selection and pruning."""
