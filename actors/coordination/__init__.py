"""Coordination of a run: rounds, work units, actor pools, liveness, evaluation and status."""
