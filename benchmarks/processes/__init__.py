"""d1 commands as child processes, and the processes of a run, seen from outside."""
