"""Benchmarks of the service on loopback: overhead over the sampler, fault tolerance, memory growth."""
