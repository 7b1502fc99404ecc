"""Reproduction of the first d1's results table: base, SFT, RL and both, at several completion lengths."""
