"""`d1 eval`, `d1 compare` and `d1 lm-eval`: evaluations of checkpoints and their comparison."""
