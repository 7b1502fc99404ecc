"""What `d1 sample` does: prompts and files of requests to completions, with one checkpoint in this process."""
