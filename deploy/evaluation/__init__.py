"""`d1 eval` and `d1 compare`: what a checkpoint solves, at every length and schedule, with its uncertainty."""
