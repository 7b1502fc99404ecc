"""Benchmark of d1 against other projects' code, imported from checkouts that the user provides."""
