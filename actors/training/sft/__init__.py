"""SFT as a stage of a run: its data, its steps, and the completions shown on the way."""
