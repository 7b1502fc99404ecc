"""`d1 report`'s file in a browser: accessibility, and small screens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.deploy.page.test_access import RULES, SIZES


def test_the_report_is_accessible_and_fits_a_phone(
    browser: Browser, d1: Callable, make_run: Callable, events: list[dict[str, Any]]
) -> None:
    directory = make_run("tiny", events)
    assert d1("report", "tiny").status == 0
    for size in SIZES.values():
        page = browser.new_page(viewport=size)
        errors: list[str] = []
        page.on("console", lambda message, errors=errors: errors.append(message.text))
        page.goto((directory.parents[1] / "report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        assert page.locator("figure svg").count() == 11
        found = Axe().run(page, options=RULES).response["violations"]
        assert [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]] == []
        assert errors == []
        page.close()
