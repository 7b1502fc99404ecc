"""OpenAI's error object: what every failure is told as. It imports nothing, so that Ray Serve's proxy can have it."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_object(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an answer with an HTTP `status`."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
