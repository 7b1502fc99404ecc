"""Adaptation of an autoregressive model to diffusion: baseline scores and the demo's training prompts."""
