"""Static files of the page, as they are served."""

from __future__ import annotations

import re
import tomllib

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from deploy.page.routes import FOLDER, page_router

ASSETS = {path.name for path in (FOLDER / "assets").iterdir()}
HEADERS = {
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
RULES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


@pytest.mark.parametrize("path", ["/", *(f"/assets/{name}" for name in sorted(ASSETS))])
def test_every_file_has_security_headers(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert HEADERS.items() <= dict(response.headers).items()
    rules = response.headers["content-security-policy"].split("; ")
    assert dict(rule.split(" ", 1) for rule in rules) == RULES
    assert client.head(path).status_code == 200
    assert client.get(path, headers={"if-none-match": response.headers["etag"]}).status_code == 304


@pytest.mark.parametrize(
    "path",
    [
        "/assets/",
        "/assets/index.html",
        "/assets/../index.html",
        "/assets/routes.py",
        "/assets/__init__.py",
        "/assets/../routes.py",
        "/assets/%2e%2e/routes.py",
        "/assets/..%2froutes.py",
        "/assets/..%2f..%2frecipe.py",
        "/assets//etc/passwd",
        "/assets/api.js%00.css",
        "/assets/API.js",
    ],
)
def test_other_files_are_not_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_public_folder_holds_only_files_of_the_page() -> None:
    assert {name.rpartition(".")[2] for name in ASSETS} == {"css", "js", "svg"}
    assert {path.name for path in FOLDER.iterdir()} - {"__pycache__"} == {
        "__init__.py",
        "assets",
        "index.html",
        "routes.py",
    }


def test_files_have_types_that_browsers_accept_with_nosniff(client: TestClient) -> None:
    kinds = {"css": "text/css", "js": "javascript", "svg": "image/svg+xml"}
    for name in ASSETS:
        assert kinds[name.rpartition(".")[2]] in client.get(f"/assets/{name}").headers["content-type"]


def test_referenced_files_are_served() -> None:
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert {path.removeprefix("assets/") for path in re.findall(r'(?:src|href)="([^"#]+)"', index)} <= set(ASSETS)
    for name in (name for name in ASSETS if name.endswith(".js")):
        text = (FOLDER / "assets" / name).read_text(encoding="utf-8")
        assert {path.removeprefix("./") for path in re.findall(r'^import .*?from "(.+?)";', text, re.MULTILINE)} <= set(
            ASSETS
        )


def test_the_page_has_no_inline_script_and_no_inline_style() -> None:
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.search(r"<style|<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=|javascript:", index) is None


def test_no_module_creates_markup_from_text() -> None:
    for name in (name for name in ASSETS if name.endswith(".js")):
        text = (FOLDER / "assets" / name).read_text(encoding="utf-8")
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert found == [], name


def test_the_installed_package_has_the_files() -> None:
    pyproject = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = pyproject["tool"]["setuptools"]["package-data"]["deploy.page"]
    packaged = {str(path.relative_to(FOLDER)) for pattern in patterns for path in FOLDER.glob(pattern)}
    assert {"index.html", *(f"assets/{name}" for name in ASSETS)} <= packaged
