"""`d1 grade` and `d1 tasks`."""
