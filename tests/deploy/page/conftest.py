"""Browser, fake service and page for the browser tests, which are skipped without a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.deploy.page.fake_service import KEY, STEPS, TEXTS, FakeService, frames, listening

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_TIMEOUT_MS = 15_000


# Not per session: Playwright's event loop runs as long as Playwright does, and tests of other files need their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or Chrome. Skips without either."""
    path = next(
        filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))),
        None,
    )
    if path is None:
        pytest.skip("needs Chromium; on Debian: apt install chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=_TIMEOUT_MS)
        chromium = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def service() -> FakeService:
    fake = FakeService()
    fake.answers["policy"] = frames(TEXTS, STEPS)
    return fake


@pytest.fixture
def url(service: FakeService) -> Iterator[str]:
    with listening(service) as address:
        yield address


class Watched:
    """A page that records dialogs, errors, console messages and requests to foreign hosts as problems."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.problems: list[str] = []
        self.expected: list[str] = []
        """Beginnings of the console messages that a test provokes."""
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("request", lambda request: self._request(request.url))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"console: {text}")

    def _request(self, url: str) -> None:
        if not url.startswith((self.url + "/", "data:", "blob:")):
            self.problems.append(f"request: {url}")

    def check(self) -> None:
        """Fail on a problem that the test did not expect."""
        left = [problem for problem in self.problems if not any(part in problem for part in self.expected)]
        assert left == []


@pytest.fixture
def open_page(browser: Browser, url: str) -> Iterator[Callable[..., Page]]:
    """Open the page in a separate browser context, with the key entered by default."""
    with ExitStack() as stack:
        watched: list[Watched] = []

        def open_(path: str = "/", *, has_key: bool = True, expected: tuple[str, ...] = (), **options: object) -> Page:
            context = browser.new_context(**{"reduced_motion": "reduce", **options})
            stack.callback(context.close)
            context.set_default_timeout(_TIMEOUT_MS)
            if has_key:
                context.add_init_script(f"sessionStorage.setItem('d1.key', '{KEY}')")
            page = context.new_page()
            watched.append(Watched(page, url))
            watched[-1].expected.extend(expected)
            page.goto(url + path)
            return page

        yield open_
        for each in watched:
            each.check()
