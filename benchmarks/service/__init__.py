"""What the service costs, what it withstands, and what it keeps: on loopback, against the same sampler by itself."""
