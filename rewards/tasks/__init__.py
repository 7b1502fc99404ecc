"""The tasks, one module each."""
