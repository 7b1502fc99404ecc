"""Benchmarks of the service on loopback: overhead over the bare sampler, fault tolerance, memory growth."""
