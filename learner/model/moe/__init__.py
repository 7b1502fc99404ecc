"""Feed-forward sublayers of many experts, of which each token takes a few."""
