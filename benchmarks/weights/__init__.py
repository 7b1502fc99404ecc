"""Benchmarks of weight transfer: checkpoint loading on learner ranks, and weight sync to samplers."""
