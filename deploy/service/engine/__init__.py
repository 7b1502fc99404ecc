"""The engine: policy versions in memory, and the thread that denoises."""
