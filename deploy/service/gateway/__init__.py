"""Access control in front of the application, and API keys with their rate limits."""
