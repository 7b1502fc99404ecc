"""The first d1's table: base, SFT, RL and both, at several completion lengths, made by d1's own commands."""
