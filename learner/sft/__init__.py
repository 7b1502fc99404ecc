"""Masked supervised fine-tuning."""
