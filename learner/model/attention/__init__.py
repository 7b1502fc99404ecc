"""Attention: rotary positions, what a slot may look at, and rows that lie back to back."""
