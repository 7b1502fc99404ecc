"""`d1 sample`: completes a prompt or a file of requests with one checkpoint, in this process."""
