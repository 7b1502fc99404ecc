"""Offline work: prompts and problems are sampled, graded and evaluated with one checkpoint."""
