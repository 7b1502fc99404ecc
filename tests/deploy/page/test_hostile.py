"""Injection: text of a model, a problem or an error is only ever shown as text."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.deploy.page.fake_service import FakeService, frames

Open = Callable[..., Page]
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "<iframe src=https://example.com></iframe>",
    "<style>*{display:none}</style><link rel=stylesheet href=//example.com/a.css>",
    "javascript:alert(4)",
    "{{7*7}} ${alert(5)} </textarea></option><b>bold",
    "[click](https://example.com) <a href=https://example.com>click</a>",
)
DIRECTION = "abc \u202egnp.exe\u202c \u2066hidden\u2069 \u200b\u0000\u001b[2J \ud800 end"
FOREIGN = "<img src=x onerror=\"window.hacked = 'foreign'\"><b id=foreign>b</b>"


def _no_markup(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    inside = "#columns img, #columns script, #columns iframe, #columns b, #columns a, #columns style, #foreign"
    expect(page.locator(inside)).to_have_count(0)
    expect(page.locator(".about :is(img, script, iframe, a, svg, style), #foreign")).to_have_count(0)


def test_markup_in_a_completion_is_shown_as_text(open_page: Open, service: FakeService) -> None:
    service.answers["policy"] = frames(HOSTILE, range(len(HOSTILE)))
    page = open_page()
    page.fill("#prompt", HOSTILE[0])
    page.click("#ask")
    expect(page.locator(".state")).to_contain_text("complete")
    expect(page.locator("#canvas-0 .slot")).to_have_text(list(HOSTILE))
    for index, text in enumerate(HOSTILE):
        page.locator("#canvas-0 .slot").nth(index).hover()
        expect(page.locator(".tip-text")).to_contain_text(text[:60])
    expect(page.locator("#announcement")).to_contain_text(HOSTILE[0])
    _no_markup(page)


def test_direction_overrides_and_controls_are_made_visible(open_page: Open, service: FakeService) -> None:
    service.answers["policy"] = frames((DIRECTION,), (0,))
    page = open_page()
    page.fill("#prompt", "x")
    page.click("#ask")
    shown = "abc \\u202egnp.exe\\u202c \\u2066hidden\\u2069 \\u200b\\u0000\\u001b[2J \\ud800 end"
    expect(page.locator("#canvas-0")).to_have_text(shown)


def test_right_to_left_text_is_unchanged(open_page: Open, service: FakeService) -> None:
    service.answers["policy"] = frames(("שלום", " עולם", " 👩‍👩‍👧"), (0, 1, 2))
    page = open_page()
    page.fill("#prompt", "x")
    page.click("#ask")
    expect(page.locator("#canvas-0")).to_have_text("שלום עולם 👩‍👩‍👧")


def test_a_hundred_kilobytes_are_truncated_and_fit_their_box(open_page: Open, service: FakeService) -> None:
    service.answers["policy"] = frames(("x" * 100_000, " y" * 50_000), (0, 1))
    page = open_page(viewport={"width": 360, "height": 740})
    page.fill("#prompt", "q" * 100_000)
    page.click("#ask")
    expect(page.locator(".state")).to_contain_text("complete")
    expect(page.locator("#canvas-0 .slot").first).to_contain_text("… 80,000 more characters")
    assert page.evaluate("document.querySelector('#canvas-0').clientHeight") < 700
    _fits(page)


def test_many_slots_are_drawn_in_time(open_page: Open, service: FakeService) -> None:
    count = 1024
    texts = [f" word{index}" for index in range(count)]
    service.answers["policy"] = frames(texts, [index // 8 for index in range(count)])
    page = open_page()
    page.fill("#prompt", "x")
    page.click("#ask")
    expect(page.locator(".state")).to_contain_text("complete")
    expect(page.locator("#canvas-0 .slot.masked")).to_have_count(0)


def test_hostile_names_numbers_and_errors_are_shown_as_text(open_page: Open, service: FakeService) -> None:
    service.models = ["policy", FOREIGN]
    service.examples = {"task": FOREIGN, "prompts": [FOREIGN]}
    service.policy |= {"run": FOREIGN, "policy_version": FOREIGN, "pinned": FOREIGN, "score": {"accuracy": FOREIGN}}
    service.policy_events = [("refused", {"version": FOREIGN, "round": 1, "time_s": FOREIGN, "why": FOREIGN})]
    service.breaks_after, service.breaks_with = 1, {"message": FOREIGN}
    page = open_page()
    expect(page.locator("#about-run")).to_have_text(FOREIGN)
    expect(page.locator("#about-task")).to_have_text(FOREIGN)
    expect(page.locator("#chips button")).to_have_text(FOREIGN)
    expect(page.locator("#serving")).to_have_text("version \u2013 · up to date")
    page.fill("#prompt", "x")
    page.click("#ask")
    expect(page.locator(".column [role=alert]")).to_contain_text(FOREIGN)
    expect(page.locator("#model option").nth(1)).to_have_text(FOREIGN)
    _no_markup(page)


def test_the_content_security_policy_blocks_injected_markup(open_page: Open) -> None:
    page = open_page(expected=("TrustedHTML", "Content Security Policy"))
    outcome = page.evaluate(
        """() => {
          try { document.body.innerHTML = '<img src=x onerror="window.hacked = 1">'; return 'set'; }
          catch (error) { return error.name; }
        }"""
    )
    assert outcome == "TypeError"
    page.evaluate("fetch('https://example.com/').catch(() => {})")
    assert page.evaluate("window.hacked") is None


def _fits(page: Page) -> None:
    width, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner
