"""Single-GPU benchmarks of LLaDA-8B's shape without Ray: hardware ceilings and d1's share of them."""
