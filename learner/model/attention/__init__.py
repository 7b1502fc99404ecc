"""Attention where it is not one call for a whole batch."""
