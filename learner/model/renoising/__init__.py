"""Uniform-noise diffusion policies without a mask token (DiffusionGemma).

A denoise step samples the whole canvas, keeps the tokens that it is sure of, and replaces the others by random ids.
"""
