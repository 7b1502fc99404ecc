"""Data loading: files, hub datasets, splits, prompts and SFT demonstrations."""
