"""The command line. Nothing here imports torch or Ray before a command needs it: `d1 --help` answers at once."""

from deploy.cli.app import app, main

__all__ = ["app", "main"]
