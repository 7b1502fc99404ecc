"""Several ranks that act as one."""
