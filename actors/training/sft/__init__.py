"""SFT as a stage of a run: its data, its steps, and sample completions."""
