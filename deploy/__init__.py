"""The edge: command line, recipes, jobs and the service."""
