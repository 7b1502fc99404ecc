"""What the pipeline of samplers, graders and learner brings, and what it costs."""
