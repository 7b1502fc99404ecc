"""Benchmarks of the pipeline of samplers, graders and learner: overlap, overhead, staleness."""
