"""Training on the learner workers: the stages of a run, with publication, checkpoints and evaluation."""
