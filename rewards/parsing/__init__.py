"""Parsing of completions: answers, numbers, expressions, code blocks."""
