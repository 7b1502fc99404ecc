"""Structured output: what JSON schemas, regular expressions and lists of choices allow, as grammars of the sampler."""
