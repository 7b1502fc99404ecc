"""Structured output: sampler grammars from JSON schemas, regular expressions and choices."""
