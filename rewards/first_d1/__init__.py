"""Compatibility with the first d1, defects included: rewards and answer parsers of the rules `d1`."""
