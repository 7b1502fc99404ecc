"""Routes of the page at `/` and of its files in `assets`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(str(files("deploy.page")))
"""Folder of `index.html`, and of the public files in `assets`."""
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


class _PublicFiles(StaticFiles):
    """Static files with the page's headers. The browser revalidates each time, and downloads only what has changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return the file, or 304 if the browser has it."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def page_router() -> APIRouter:
    """Return the routes `/` and `/assets/*`. They need no key, because the files are public."""
    public, index = _PublicFiles(directory=FOLDER / "assets"), FOLDER / "index.html"
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return public.file_response(index, index.stat(), request.scope)

    @router.api_route("/assets/{name:path}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        return await public.get_response(name, request.scope)

    return router
