"""Structured output: a finite automaton over token ids restricts commits, in any order of the slots."""
