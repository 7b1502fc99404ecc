"""How an ingress reaches engines: load balancing, failover, cancellation, serialization, connections."""
