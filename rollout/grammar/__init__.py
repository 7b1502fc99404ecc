"""Structured output: a finite automaton over token ids says what may be committed, in any order of the slots."""
