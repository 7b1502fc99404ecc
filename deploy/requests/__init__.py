"""Requests for completions: the bodies of the HTTP API, which are also the lines of `d1 sample`, and their planner."""
