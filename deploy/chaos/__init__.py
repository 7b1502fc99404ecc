"""Chaos: a run is killed, starved and lied to, and its history is compared with an undisturbed one's."""
