"""Every failure of the service as one of OpenAI's error objects."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from deploy.service.schemas import ErrorDetail, ErrorResponse

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_MESSAGES = {400: "The body is not JSON.", 404: "There is no such path.", 405: "This path does not know that method."}


class ServiceError(Exception):
    """A failure that the client is told about, in one sentence."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def error_response(status: int, message: str, code: str | None = None) -> JSONResponse:
    """The answer to a request that failed."""
    detail = ErrorDetail(message=message, type=_TYPES.get(status, "invalid_request_error"), code=code)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {"retry-after": "1"} if status == 503 else None
    return JSONResponse(ErrorResponse(error=detail).model_dump(), status_code=status, headers=headers)


def install_handlers(app: FastAPI) -> None:
    """Make every failure inside `app` one of these answers."""

    @app.exception_handler(ServiceError)
    async def of_service(_: Request, error: ServiceError) -> JSONResponse:
        return error_response(error.status, error.message, error.code)

    @app.exception_handler(RequestValidationError)
    async def of_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_response(400, "The body is not JSON.")
        field = ".".join(part for part in first["loc"][1:2] if isinstance(part, str)) or "body"
        if first["type"] == "extra_forbidden":
            # The one thing of the client's that is quoted, and only if it is a plain name.
            name = f"`{field}`" if field.isascii() and field.isidentifier() and len(field) < 65 else "a field"
            return error_response(400, f"The body has {name}, which this service does not know.", "unknown_parameter")
        return error_response(400, f"`{field}`: {first['msg'].removeprefix('Value error, ')}.")

    @app.exception_handler(HTTPException)
    async def of_http(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, _MESSAGES.get(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def of_bug(_: Request, __: Exception) -> JSONResponse:
        # Starlette raises the exception again after this answer, so that the server logs it.
        return error_response(500, "The service failed; the failure is in its log.")
