"""Files of a run: replaced atomically, appended line by line, and written in the background."""
