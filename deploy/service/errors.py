"""Errors of the service as OpenAI's error objects."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from deploy.requests.errors import RequestError
from deploy.service.contract import Refused

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MESSAGES = {
    400: "The body is not JSON.",
    404: "There is no such path.",
    405: "This path does not allow that method.",
}


class Error(BaseModel):
    """Error of a request."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    message: str
    """One sentence."""
    type: str
    param: str | None
    """Field of the request."""
    code: str | None
    """Identifier for programs."""


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    model_config = ConfigDict(extra="forbid")

    error: Error


class ServiceError(Exception):
    """Error that is sent to the client, in one sentence."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, refused: Refused) -> ServiceError:
        """Create the error of an engine's refusal."""
        return cls(refused.status, refused.message, refused.code, retry_after_s=refused.retry_after_s)

    @property
    def body(self) -> ErrorBody:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorBody(error=Error(message=self.message, type=kind, param=self.param, code=self.code))

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body.model_dump(), status_code=self.status, headers=headers)


def install_handlers(app: FastAPI) -> None:
    """Convert every exception in `app` to an error object."""

    @app.exception_handler(ServiceError)
    async def of_service(_: Request, error: ServiceError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestError)
    async def of_request(_: Request, error: RequestError) -> JSONResponse:
        return ServiceError(400, f"{error}.", error.code, param=error.param).response()

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        detail = error.errors()[0]
        if isinstance(detail.get("input"), bytes):
            # FastAPI parses a body only if its Content-Type is JSON.
            sent = "has another Content-Type" if "content-type" in request.headers else "has no Content-Type"
            message = f"The request {sent}; send JSON with the header `Content-Type: application/json`."
            return ServiceError(400, message, "invalid_content_type").response()
        return refusal_of(detail).response()

    @app.exception_handler(HTTPException)
    async def of_http(_: Request, error: HTTPException) -> JSONResponse:
        response = ServiceError(error.status_code, _MESSAGES.get(error.status_code, str(error.detail))).response()
        # For example the methods that a path allows.
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def of_bug(_: Request, __: Exception) -> JSONResponse:
        # Starlette raises the exception again after this response, so that the server logs it.
        return ServiceError(500, "The service failed; the failure is in its log.").response()


def refusal_of(detail: Any) -> ServiceError:
    """Create the error of a validation error of pydantic, about a body or a path."""
    if detail["type"] == "json_invalid":
        return ServiceError(400, "The body is not JSON.")
    parts = [part for part in detail["loc"][1:] if isinstance(part, str) and not part.startswith("function-")]
    # The client's own text is quoted only if it is a plain name.
    is_plain = all(part.isascii() and part.isidentifier() and len(part) < 65 for part in parts)
    field = ".".join(parts[:3]) if parts and is_plain else None
    if detail["type"] == "extra_forbidden":
        name = f"`{field}`" if field else "a field"
        message = f"The body has {name}, which this service does not know."
        return ServiceError(400, message, "unknown_parameter", param=field)
    message = f"`{field or 'body'}`: {detail['msg'].removeprefix('Value error, ')}."
    return ServiceError(400, message, "invalid_value", param=field)
