"""The commands of d1 on one GPU, under Ray: what a user types, in eight minutes."""
