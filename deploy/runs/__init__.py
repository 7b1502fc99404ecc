"""Run directories: made, locked, listed, and shown to people."""
