"""The service: HTTP answers from the newest policy version, on Ray Serve."""

from deploy.service.launch import banner, deploy_service, serve_checkpoint, serve_run

__all__ = ["banner", "deploy_service", "serve_checkpoint", "serve_run"]
