"""Planned sizes and FLOP of a policy and its updates, from their configs alone."""
