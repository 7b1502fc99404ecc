"""What runs in each learner worker, and what it reads and writes."""
