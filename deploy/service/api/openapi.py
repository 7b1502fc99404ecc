"""OpenAPI schema of the service: the answers of each route, and which need a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deploy.service.api.replies import ChatChunk, PolicyEvent, TextChunk
from deploy.service.errors import ErrorBody
from deploy.service.gateway.access import is_open

_ERRORS = {
    400: "The request is invalid or not supported; the message says why.",
    401: "The request has no valid key.",
    404: "There is no such model, version or run here.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    429: "Too many requests; Retry-After says when to try again.",
    503: "No engine is available, or the service is shutting down; Retry-After says when to try again.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_REFERENCE = "#/components/schemas/{model}"
_EVENTS = (ChatChunk, ErrorBody, PolicyEvent, TextChunk)


def described(
    body: type[BaseModel] | None, *statuses: int, events: tuple[type[BaseModel], ...] = (), is_ended: bool = True
) -> dict[str, Any]:
    """Return the arguments of a route's decorator. `describe` adds what all routes that need a key have in common.

    Args:
        body: model of the answer; None if it is not JSON.
        statuses: statuses of its errors.
        events: models of its server-sent events, if it can stream.
        is_ended: whether a stream ends with `[DONE]`.
    """
    answer: dict[str, Any] = {"description": "The answer."}
    answer |= {} if body is None else {"model": body}
    answer |= {"content": _stream_of(events, is_ended)} if events else {}
    responses = {200: answer} | {status: _error(status) for status in statuses}
    return {"status_code": 200, "response_model": None, "responses": responses}


def _stream_of(events: tuple[type[BaseModel], ...], is_ended: bool) -> dict[str, Any]:
    """Describe server-sent events as in OpenAPI 3.2."""
    kinds = [{"$ref": _REFERENCE.format(model=kind.__name__)} for kind in events]
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    data = {"anyOf": [{"const": "[DONE]"}, json]} if is_ended else json
    properties = {"data": data, "event": {"type": "string"}, "id": {"type": "string"}}
    return {"text/event-stream": {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}}


def describe(app: FastAPI) -> None:
    """Add to the schema of `app` which routes need a key, and remove status 422, which is never sent."""
    plain: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _corrected(plain())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _corrected(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema["components"]
    # FastAPI adds no models of streams.
    _, chunks = models_json_schema([(kind, "serialization") for kind in _EVENTS], ref_template=_REFERENCE)
    components["schemas"] |= chunks["$defs"]
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            # FastAPI's status of an invalid request; this service sends 400.
            responses.pop("422", None)
            if not is_open(method.upper(), path):
                operation["security"] = [{"key": []}]
                responses |= {"401": _inline(401), "429": _inline(429)}
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return schema


def _error(status: int) -> dict[str, Any]:
    headers = {"headers": _RETRY_AFTER} if status in (429, 503) else {}
    return {"model": ErrorBody, "description": _ERRORS[status], **headers}


def _inline(status: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=ErrorBody.__name__)}}}
    return {key: value for key, value in _error(status).items() if key != "model"} | {"content": content}
