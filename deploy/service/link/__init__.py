"""How an ingress reaches engines: connections, failover, cancellation."""
