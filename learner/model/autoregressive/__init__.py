"""Autoregressive language models that a diffusion policy can start from: opened, and written as a policy."""
