"""Routes of the page at `/`: the files of this folder that are listed here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

INDEX = "index.html"
# Looked up by their whole name: no path is built from client input.
ASSETS: Mapping[str, str] = {
    "api.js": "text/javascript",
    "answer.js": "text/javascript",
    "ask.css": "text/css",
    "ask.js": "text/javascript",
    "canvas.js": "text/javascript",
    "dom.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript",
    "numbers.js": "text/javascript",
    "page.css": "text/css",
    "player.js": "text/javascript",
    "policy.js": "text/javascript",
    "problems.js": "text/javascript",
    "recording.js": "text/javascript",
    "sse.js": "text/javascript",
    "theme.js": "text/javascript",
    "wait.js": "text/javascript",
}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Scripts cannot turn strings, such as the model's text, into markup or code.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class _File:
    """Static file, read once."""

    def __init__(self, name: str, media_type: str) -> None:
        self._body = files("deploy.page").joinpath(name).read_bytes()
        # The browser revalidates each time, and downloads a file only when it has changed.
        self._etag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._media_type = media_type

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it."""
        headers = HEADERS | {"etag": self._etag}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        # Starlette adds the character set to texts.
        return Response(self._body, headers=headers, media_type=self._media_type)


def page_router() -> APIRouter:
    """Return the routes `/` and `/assets/*`. They need no key, because the files are public."""
    index = _File(INDEX, "text/html")
    assets = {name: _File(name, media_type) for name, media_type in ASSETS.items()}
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return index.answer(request)

    @router.api_route("/assets/{name:path}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise HTTPException(404)
        return assets[name].answer(request)

    return router
