"""Benchmarks of weights on their way: onto the ranks of a learner, and from there to the samplers."""
