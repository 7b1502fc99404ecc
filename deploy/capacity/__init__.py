"""Capacity planning: the GPU memory and time that a recipe needs, derived without a GPU at hand."""
