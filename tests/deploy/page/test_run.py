"""The page's view of a run, in a browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from deploy.runs import live_history
from tests.deploy.page.fake_service import SAMPLE, FakeService, evaluation_event, round_event

Open = Callable[..., Page]
CURVES = ("reward", "accuracy", "kl", "staleness", "throughput", "sft")
NETWORK = "console: Failed to load resource"


def _plot(page: Page, name: str) -> Locator:
    return page.locator(f"#plot-{name}")


def _fill(service: FakeService, num_rounds: int) -> None:
    service.events += [
        {"event": "run", "time_s": 0.0, "name": "tiny", "began_at": 0.0},
        {"event": "phase", "time_s": 1.0, "phase": "sft", "num_steps": 2},
        *({"event": "sft", "time_s": 2.0 + step, "phase": "sft", "step": step, "loss": 3.0 - step} for step in (1, 2)),
        evaluation_event("sft", 30.0, 87),
        {"event": "phase", "time_s": 31.0, "phase": "rl", "num_steps": 400},
        *map(round_event, range(num_rounds)),
    ]


def test_curves_grow_while_the_run_trains(open_page: Open, service: FakeService) -> None:
    _fill(service, 3)
    page = open_page("/#run")
    for name in ("reward", "kl", "staleness", "throughput"):
        expect(_plot(page, name)).to_have_attribute("data-points", "3")
    expect(_plot(page, "accuracy")).to_have_attribute("data-points", "1")
    expect(_plot(page, "sft")).to_have_attribute("data-points", "2")
    expect(_plot(page, "reward").get_by_role("img")).to_have_accessible_name("Reward: reward 0.6 at round 3")
    expect(page.locator("#run-facts")).to_contain_text("3 of 400")
    before = _ink(page, "reward")
    service.events += [round_event(3), round_event(4), evaluation_event("round", 66.0, 400, 5)]
    for name in ("reward", "kl", "staleness", "throughput"):
        expect(_plot(page, name)).to_have_attribute("data-points", "5")
    expect(_plot(page, "reward").get_by_role("img")).to_have_accessible_name("Reward: reward 0.8 at round 5")
    expect(_plot(page, "accuracy").locator(".plot-value")).to_have_text("40.0 % (37.0 to 43.1)")
    expect(page.locator("#run-facts")).to_contain_text("5 of 400")
    assert _ink(page, "reward") != before


def _ink(page: Page, name: str) -> str:
    """Return the pixels of the curve's canvas, as a data URL."""
    return page.evaluate("name => document.querySelector(`#plot-${name} canvas`).toDataURL()", name)


def test_each_round_is_asked_for_once(open_page: Open, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_history, "MAX_ITEMS", 200)
    _fill(service, 300)
    page = open_page("/#run")
    expect(_plot(page, "reward")).to_have_attribute("data-points", "300")
    service.events.append(round_event(300))
    expect(_plot(page, "reward")).to_have_attribute("data-points", "301")
    asked = [query for path, query in zip(service.paths, service.queries, strict=True) if path == "/v1/run/history"]
    assert asked[:3] == ["", "after=0.0.200.2.1", "after=0.0.300.2.1"]
    assert "after=0.0.301.2.1" in asked


def test_rounds_that_a_resumed_run_repeats_replace_the_first_ones(open_page: Open, service: FakeService) -> None:
    _fill(service, 5)
    page = open_page("/#run")
    expect(_plot(page, "reward")).to_have_attribute("data-points", "5")
    service.events.append(round_event(2, reward=0.123))
    expect(_plot(page, "reward")).to_have_attribute("data-points", "3")
    page.locator(".numbers summary").click()
    rows = page.locator("#round-table tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("0.123")


def test_a_number_that_is_missing_is_a_gap(open_page: Open, service: FakeService) -> None:
    _fill(service, 2)
    service.events += [round_event(2, kl=None), round_event(3)]
    page = open_page("/#run")
    expect(_plot(page, "kl")).to_have_attribute("data-points", "4")
    page.locator(".numbers summary").click()
    expect(page.locator("#round-table tbody tr").nth(1)).to_contain_text("\u2013")


def test_samples_show_the_parts_of_their_reward(open_page: Open, service: FakeService) -> None:
    _fill(service, 5)
    timed_out = {**SAMPLE, "round": 3, "outcome": "timeout", "correct": False, "reward_parts": {}}
    service.samples = [timed_out, SAMPLE, {**SAMPLE, "round": 5, "correct": True, "reward": 1.0}]
    page = open_page("/#run")
    rows = page.locator("#samples tbody tr")
    expect(rows.nth(0)).to_contain_text("✓ right")
    expect(rows.nth(1).locator("dt")).to_have_text(["cells", "format"])
    expect(rows.nth(1).locator("dd")).to_have_text(["0.5", "0.25"])
    expect(rows.nth(1)).to_contain_text("✗ wrong")
    expect(rows.nth(2)).to_contain_text("not graded: timeout")
    service.samples.append({**SAMPLE, "round": 8, "completion": "later"})
    expect(rows).to_have_count(4)
    expect(rows.nth(0)).to_contain_text("later")


def test_pools_say_how_they_fare(open_page: Open, service: FakeService) -> None:
    _fill(service, 1)
    service.events += [{"event": "failure", "time_s": 70.0, "what": "a sampler died", "attempt": 1}]
    service.pools["replicas"] = [
        {"id": "one", "policy_version": 12, "healthy": True, "running": 3, "waiting": 0},
        {"id": "two", "policy_version": 11, "healthy": False, "running": 0, "waiting": 4},
    ]
    service.pools["follower"] = {"registry_reachable": False, "num_errors": 2, "last_error": "no route"}
    page = open_page("/#run")
    rows = page.locator("#replicas tbody tr")
    expect(rows).to_have_text(["one✓ healthy1230", "two✗ not answering1104"])
    expect(page.locator("#pool-facts")).to_contain_text(
        "Samplers, last round2, ✓ all answer, at work 83.0 % of the time"
    )
    expect(page.locator("#pool-facts")).to_contain_text(
        "Graders, last round4, ✗ 1 restarting, at work 10.0 % of the time"
    )
    expect(page.locator("#pool-facts")).to_contain_text("Failures the run survived1")
    expect(page.locator("#pool-facts")).to_contain_text("not reachable; last error: no route")


def test_the_policy_and_its_lag_follow_the_events(open_page: Open, service: FakeService) -> None:
    _fill(service, 1)
    page = open_page("/#run")
    expect(page.locator("#serving")).to_have_text("version 12 · up to date")
    service.policy |= {"lag": {"published": 14, "behind": 2}}
    service.policy_events.append(("published", {"version": 14, "round": 13, "time_s": 70.0}))
    expect(page.locator("#serving")).to_have_text("version 12 · 2 versions behind")
    service.policy |= {"policy_version": 14, "lag": {"published": 14, "behind": 0}}
    service.policy_events.append(("serving", {"version": 14, "round": 13, "time_s": 71.0}))
    service.policy_events.append(("refused", {"version": 13, "round": 12, "time_s": 72.0, "why": "bad checksum"}))
    expect(page.locator("#serving")).to_have_text("version 14 · up to date")
    events = page.locator("#policy-events li")
    expect(events).to_have_count(3)
    expect(events.nth(0)).to_contain_text("version 13 was refused: bad checksum")
    expect(events.nth(1)).to_contain_text("version 14 answers")


def test_what_an_operator_holds_is_shown(open_page: Open, service: FakeService) -> None:
    _fill(service, 1)
    service.policy |= {"pinned": 12, "paused": True, "lag": {"published": 14, "behind": 2}}
    service.policy_events += [
        ("rebuilt", {"version": 14, "round": 13, "time_s": 1e9, "why": "15 versions from the run directory"}),
        ("pinned", {"version": 12, "round": 11, "time_s": 1e9 + 1, "why": "it adds well"}),
        ("paused", {"version": None, "round": None, "time_s": 1e9 + 2, "why": None}),
    ]
    page = open_page("/#run")
    expect(page.locator("#serving")).to_have_text("version 12 · 2 versions behind · pinned to version 12 · paused")
    expect(page.locator("#policy-facts")).to_contain_text("Heldpinned to version 12, paused")
    events = page.locator("#policy-events li")
    expect(events).to_have_count(3)
    expect(events.nth(0)).to_contain_text("Swaps are paused")
    expect(events.nth(1)).to_contain_text("version 12 was pinned: it adds well")
    expect(events.nth(2)).to_contain_text("The registry was rebuilt: 15 versions from the run directory")


def test_a_cut_event_stream_is_taken_up_where_it_ended(open_page: Open, service: FakeService) -> None:
    service.policy_events += [("published", {"version": 2, "round": 1, "time_s": 1.0})]
    page = open_page("/#run")
    events = page.locator("#policy-events li")
    expect(events).to_have_count(1)
    service.cuts_policy_events = True
    service.policy_events += [("serving", {"version": 2, "round": 1, "time_s": 2.0})]
    expect(events).to_have_count(2)
    assert service.last_event_ids[:2] == [None, "1"]


def test_without_a_run_nothing_breaks_and_asking_works(open_page: Open, service: FakeService) -> None:
    service.run = None
    page = open_page("/#run", expected=(NETWORK,))
    expect(page.locator("#run-notice")).to_contain_text("a checkpoint without a run")
    expect(page.locator("#curves")).to_be_hidden()
    expect(page.locator("#samples")).to_be_hidden()
    expect(page.locator("#policy-facts")).to_be_visible()
    num_asked = service.paths.count("/v1/run/history")
    page.click("#nav-ask")
    page.fill("#prompt", "What is 2 + 3?")
    page.click("#ask")
    expect(page.locator(".state")).to_contain_text("complete")
    page.wait_for_timeout(2500)
    assert service.paths.count("/v1/run/history") == num_asked


def test_a_run_without_rounds_says_what_is_to_come(open_page: Open, service: FakeService) -> None:
    page = open_page("/#run")
    for name in CURVES:
        expect(_plot(page, name).locator(".plot-empty")).to_be_visible()
    expect(page.locator("#samples")).to_contain_text("No completion has been kept yet.")
    expect(page.locator("#replicas")).to_contain_text("No replica is up.")


def test_a_service_that_goes_away_is_reported_and_found_again(open_page: Open, service: FakeService) -> None:
    _fill(service, 2)
    page = open_page("/#run", expected=(NETWORK,))
    expect(_plot(page, "reward")).to_have_attribute("data-points", "2")
    page.route("**/v1/**", lambda route: route.abort())
    expect(page.locator("#run-notice")).to_contain_text("The connection to the service broke. Trying again in")
    expect(_plot(page, "reward")).to_be_visible()
    page.unroute("**/v1/**")
    service.events.append(round_event(2))
    expect(_plot(page, "reward")).to_have_attribute("data-points", "3")
    expect(page.locator("#run-notice")).to_be_hidden()


def test_a_view_that_no_one_looks_at_asks_for_nothing(open_page: Open, service: FakeService) -> None:
    _fill(service, 2)
    page = open_page("/#ask")
    expect(page.locator("#serving")).to_contain_text("version 12")
    page.wait_for_timeout(300)
    assert {path for path in service.paths if path.startswith("/v1/run")} == {"/v1/run/problems"}
    page.click("#nav-run")
    expect(_plot(page, "reward")).to_have_attribute("data-points", "2")


def test_a_sample_is_asked_again_with_a_click(open_page: Open, service: FakeService) -> None:
    _fill(service, 2)
    service.samples = [SAMPLE]
    page = open_page("/#run")
    page.click("#samples >> text=Ask this")
    expect(page.locator("#view-ask")).to_be_visible()
    expect(page.locator("#prompt")).to_have_value("1230")
    expect(page.locator(".column .state")).to_contain_text("complete")
    (asked,) = service.requests
    assert asked["messages"] == [{"role": "user", "content": "1230"}]


def test_curves_are_redrawn_in_the_other_theme_and_the_choice_is_kept(open_page: Open, service: FakeService) -> None:
    _fill(service, 5)
    page = open_page("/#run", color_scheme="light")
    expect(_plot(page, "reward")).to_have_attribute("data-points", "5")
    light = _ink(page, "reward"), page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme-toggle")
    dark = _ink(page, "reward"), page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    expect(page.locator("#theme-toggle")).to_have_accessible_name("Light theme")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark[1]
