"""Policy network, checkpoints and tokenizer."""
