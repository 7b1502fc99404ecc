"""What the page shows of the policy that answers, in a browser."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.deploy.page.fake_service import FakeService

Open = Callable[..., Page]
NETWORK = "console: Failed to load resource"


def test_the_policy_and_its_lag_follow_the_events(open_page: Open, service: FakeService) -> None:
    page = open_page()
    serving = page.locator("#serving")
    expect(serving).to_have_text("version 12 · up to date")
    service.policy |= {"lag": {"published": 14, "behind": 2}}
    service.policy_events.append(("published", {"version": 14, "round": 13, "time_s": 70.0}))
    expect(serving).to_have_text("version 12 · 2 versions behind")
    service.policy |= {"policy_version": 14, "lag": {"published": 14, "behind": 0}, "pinned": 14, "paused": True}
    service.models.append("policy@v000014")
    service.policy_events.append(("serving", {"version": 14, "round": 13, "time_s": 71.0}))
    expect(serving).to_have_text("version 14 · up to date · pinned to version 14 · paused")
    expect(page.locator("#model option")).to_have_text(
        ["policy (newest)", "base", "version 14", "version 12", "version 11"]
    )


def test_an_interrupted_event_stream_is_resumed(open_page: Open, service: FakeService) -> None:
    page = open_page()
    expect(page.locator("#serving")).to_have_text("version 12 · up to date")
    # Only the first event makes the page ask again, so it has been read before the stream is cut.
    service.policy |= {"lag": {"published": 13, "behind": 1}}
    service.policy_events += [("published", {"version": 13, "round": 12, "time_s": 1.0})]
    expect(page.locator("#serving")).to_have_text("version 12 · 1 version behind")
    service.cuts_policy_events = True
    service.policy |= {"policy_version": 13, "lag": {"published": 13, "behind": 0}}
    service.policy_events += [("serving", {"version": 13, "round": 12, "time_s": 2.0})]
    expect(page.locator("#serving")).to_have_text("version 13 · up to date")
    # The page refreshes before it opens the stream again.
    while len(service.last_event_ids) < 2:
        page.wait_for_timeout(20)
    assert service.last_event_ids[:2] == [None, "1"]


def test_an_unreachable_service_is_reported_and_found_again(open_page: Open, service: FakeService) -> None:
    page = open_page(expected=(NETWORK,))
    expect(page.locator("#serving")).to_have_text("version 12 · up to date")
    page.route("**/v1/**", lambda route: route.abort())
    service.cuts_policy_events = True
    expect(page.locator("#serving")).to_have_text("not reachable")
    page.unroute("**/v1/**")
    expect(page.locator("#serving")).to_have_text("version 12 · up to date")
