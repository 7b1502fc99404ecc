"""Completion requests: HTTP bodies and `d1 sample` lines, validated and planned for the sampler."""
