"""User-facing layer of d1: command line, recipes, jobs and the service."""
