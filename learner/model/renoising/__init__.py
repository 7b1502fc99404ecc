"""Policies without a mask token: a step draws the whole canvas anew and keeps what it is sure of (DiffusionGemma)."""
