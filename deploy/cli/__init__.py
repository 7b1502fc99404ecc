"""Command line of d1.

Nothing here imports torch or Ray before a command needs it, so that `d1 --help` answers at once.
"""

from deploy.cli.app import app, main

__all__ = ["app", "main"]
