"""Accessibility of the page: axe-core's rules, small screens, reduced motion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.deploy.page.fake_service import STEPS, TEXTS, FakeService, frames

Open = Callable[..., Page]
SIZES = {"desktop": {"width": 1180, "height": 800}, "phone": {"width": 360, "height": 740}}
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


def _violations(page: Page) -> list[str]:
    found = Axe().run(page, options=RULES).response["violations"]
    return [f"{each['id']}: {node['html']} {node['failureSummary']}" for each in found for node in each["nodes"]]


# The other two combinations repeat the sizes and schemes of these two.
@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ("desktop", "light"),
        ("phone", "dark"),
        pytest.param("desktop", "dark", marks=pytest.mark.nightly),
        pytest.param("phone", "light", marks=pytest.mark.nightly),
    ],
)
def test_axe_finds_no_violations(open_page: Open, service: FakeService, scheme: str, size: str) -> None:
    service.answers["policy"] = frames((*TEXTS, "<|endoftext|>"), (*STEPS, 0))
    service.text = "".join(TEXTS)
    service.allowed = 3
    page = open_page(color_scheme=scheme, viewport=SIZES[size])
    page.click("#key-toggle")
    page.locator("#options summary").click()
    page.check("#compare")
    page.fill("#prompt", "What is 2 + 3?")
    page.click("#ask")
    expect(page.locator("#where")).to_contain_text("step 2")
    assert _violations(page) == []
    service.allowed = 10
    expect(page.locator(".state").last).to_contain_text("complete")
    page.locator("#canvas-1 .slot.outside").hover()
    assert _violations(page) == []


@pytest.mark.parametrize("width", [320, 360, 768])
def test_nothing_is_wider_than_the_screen(open_page: Open, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 740})
    page.check("#compare")
    page.locator("#options summary").click()
    page.fill("#prompt", "What is 2 + 3?")
    page.click("#ask")
    expect(page.locator(".state").last).to_contain_text("complete")
    _fits(page)
    page.click("#key-toggle")
    _fits(page)


def _fits(page: Page) -> None:
    width, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner


@pytest.mark.parametrize(("motion", "animation"), [("reduce", "none"), ("no-preference", "commit")])
def test_slots_fade_in_unless_reduced_motion_is_preferred(
    open_page: Open, service: FakeService, motion: str, animation: str
) -> None:
    service.allowed = 1
    page = open_page(reduced_motion=motion)
    page.fill("#prompt", "x")
    page.click("#ask")
    expect(page.locator("#canvas-0 .masked").first).to_be_visible()
    service.allowed = 2
    new = page.locator("#canvas-0 .slot.new").first
    expect(new).to_be_visible()
    assert new.evaluate("element => getComputedStyle(element).animationName") == animation


def test_the_page_has_landmarks_a_heading_a_title_and_a_skip_link(open_page: Open) -> None:
    page = open_page()
    for role in ("banner", "main"):
        expect(page.get_by_role(role)).to_have_count(1)
    expect(page).to_have_title("Ask · d1")
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#content")).to_be_focused()


def test_a_chosen_theme_is_kept(open_page: Open) -> None:
    page = open_page(color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme-toggle")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    expect(page.locator("#theme-toggle")).to_have_accessible_name("Light theme")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
