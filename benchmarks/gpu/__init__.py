"""What one GPU makes of a policy of LLaDA-8B's shape, without Ray: ceilings, then what d1 reaches of them."""
