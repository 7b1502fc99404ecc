"""Single-GPU benchmarks of LLaDA-8B's shape without Ray: hardware ceilings, and the share that d1 reaches."""
