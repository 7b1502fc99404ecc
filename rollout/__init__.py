"""Policy and token ids in, completions out. Knows no text, no reward, no Ray."""
