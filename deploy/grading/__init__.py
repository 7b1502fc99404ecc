"""`d1 grade` and `d1 tasks`: grading of generation files, and descriptions of the tasks."""
