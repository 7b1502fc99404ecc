"""The policy network, its checkpoints and its tokenizer."""
