"""Compatibility with the first d1: its rewards and answer parsers, defects included (protocol and reward `d1`)."""
