"""The service as Ray Serve deployments."""
