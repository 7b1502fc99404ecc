"""A run as a job: preflight, start, monitoring, scaling, stop and cleanup."""
