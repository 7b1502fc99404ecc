"""Data parallelism of the learner: sharding, micro-batches and consensus of its ranks."""
