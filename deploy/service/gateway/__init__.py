"""What stands before the application: the HTTP server, API keys, rate limits, metrics."""
