"""Registry of policy versions: on Redis, or rebuilt from run directories."""
