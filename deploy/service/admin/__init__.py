"""What an operator does to a service."""
