"""Estimators of whole decoding states: every masked slot of a state counts, and not only those that were committed."""
