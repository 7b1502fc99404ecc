"""`d1 sample`: completes a prompt or a file of requests."""
