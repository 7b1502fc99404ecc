"""The OpenAPI schema of the service: what each route answers, and who may ask."""

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
    400: "What was asked is not valid, or not supported; the message says what.",
    401: "The request has no key that opens.",
    404: "There is no such model, version or run here.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "Too many requests; Retry-After says when to try again.",
    503: "No engine answers, or the service is shutting down; Retry-After says when to try again.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_REFERENCE = "#/components/schemas/{model}"
_EVENTS = (ChatChunk, ErrorBody, PolicyEvent, TextChunk)


def described(
    body: type[BaseModel] | None, *statuses: int, events: tuple[type[BaseModel], ...] = (), is_ended: bool = True
) -> dict[str, Any]:
    """The arguments of a route for its decorator. What every closed route says is added by `describe`.

    Args:
        body: what it answers; None where that is no JSON.
        statuses: what it fails with, besides.
        events: of what kinds its server-sent events are, where it streams or can be asked to.
        is_ended: whether the last of them is `[DONE]`.
    """
    answer: dict[str, Any] = {"description": "The answer."}
    answer |= {} if body is None else {"model": body}
    answer |= {"content": _stream_of(events, is_ended)} if events else {}
    responses = {200: answer} | {status: _error(status) for status in statuses}
    return {"status_code": 200, "response_model": None, "responses": responses}


def _stream_of(events: tuple[type[BaseModel], ...], is_ended: bool) -> dict[str, Any]:
    """Server-sent events, as OpenAPI 3.2 describes them."""
    kinds = [{"$ref": _REFERENCE.format(model=kind.__name__)} for kind in events]
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    data = {"anyOf": [{"const": "[DONE]"}, json]} if is_ended else json
    properties = {"data": data, "event": {"type": "string"}, "id": {"type": "string"}}
    return {"text/event-stream": {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}}


def describe(app: FastAPI) -> None:
    """Make the schema of `app` say what is true of all routes: who may ask, and that 422 is never said."""
    plain: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _corrected(plain())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _corrected(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema["components"]
    # FastAPI does not look into streams.
    _, chunks = models_json_schema([(kind, "serialization") for kind in _EVENTS], ref_template=_REFERENCE)
    components["schemas"] |= chunks["$defs"]
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            # FastAPI's own answer to what is not valid; ours is 400.
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
