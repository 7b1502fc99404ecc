"""Capacity planning: what a recipe takes of GPUs, in memory and seconds, before one is at hand. It is all derived."""
