"""Checkpoint files on disk: multithreaded reading and hashing, references, progress messages."""
