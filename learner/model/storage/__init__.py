"""Checkpoint files on disk: multithreaded reading and hashing, references to files elsewhere, progress messages."""
