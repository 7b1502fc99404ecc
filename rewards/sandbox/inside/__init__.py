"""Code that runs inside the sandbox, on the standard library alone; it executes untrusted programs.

Nothing outside the sandbox imports `program`, `candidate` or `judge`: they are mounted read-only and started inside.
Both sides use `wire`.
"""
