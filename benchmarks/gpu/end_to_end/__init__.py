"""End-to-end benchmark of d1's commands on one GPU, under Ray, in eight minutes."""
