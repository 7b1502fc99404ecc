"""Adapting an autoregressive model: its own scores, and the prompts of the demo's training."""
