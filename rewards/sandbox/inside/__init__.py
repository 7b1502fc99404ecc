"""What runs inside a sandbox: plain Python of the standard library, and the only code here that executes other code.

Nothing outside the sandbox imports `program`, `candidate` or `judge`; they are bound into it read-only and started
there. Both sides read and write `wire`.
"""
