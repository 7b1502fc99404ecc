"""What stands before the application: the HTTP server, access control, API keys, rate limits."""
