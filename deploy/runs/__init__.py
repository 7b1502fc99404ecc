"""Run directories: creation, locking, mirroring, listing and display."""
