"""Mixture-of-experts feed-forward layers, with top-k routing of each token."""
