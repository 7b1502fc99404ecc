"""Adapter directories that peft wrote: what their config says, and their matrices under our names."""
