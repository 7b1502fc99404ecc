"""The page's view for prompting a policy, in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.deploy.page.fake_service import KEY, OPEN, STEPS, TEXTS, FakeService, frames

Open = Callable[..., Page]
EOS = "<|endoftext|>"
SENTENCE = "".join(TEXTS)
NUM_STEPS = max(STEPS) + 1
NETWORK = "console: Failed to load resource"


def _ask(page: Page, prompt: str = "What is 2 + 3?") -> None:
    page.fill("#prompt", prompt)
    page.click("#ask")


def _canvas(page: Page, index: int = 0) -> Locator:
    return page.locator(f"#canvas-{index}")


def _expect_done(page: Page, index: int = 0) -> None:
    expect(page.locator(".column").nth(index).locator(".state")).to_contain_text("complete")
    # Frames that arrived faster than they can be seen are still being played.
    expect(page.locator("#play")).to_have_accessible_name("Play")


def test_a_completion_fills_in_slot_by_slot(open_page: Open, service: FakeService) -> None:
    service.allowed = 1
    page = open_page()
    _ask(page)
    masked = _canvas(page).locator(".slot.masked")
    expect(masked).to_have_count(len(TEXTS))
    for done in range(1, NUM_STEPS + 1):
        service.allowed = done + 1
        expect(masked).to_have_count(sum(step >= done for step in STEPS))
        expect(page.locator("#where")).to_have_text(f"step {done} of {NUM_STEPS}")
    _expect_done(page)
    expect(_canvas(page)).to_have_text(SENTENCE)
    expect(page.locator(".usage")).to_have_text(f"{NUM_STEPS} forwards · 9 tokens · 1.8 tokens per forward")
    expect(page.locator(".column h3")).to_have_text("policy · version 12")


def test_a_committed_slot_keeps_its_element(open_page: Open, service: FakeService) -> None:
    service.allowed = 2
    page = open_page()
    _ask(page)
    first = _canvas(page).locator(".slot:not(.masked)").first
    expect(first).to_have_text(" of")
    handle = first.element_handle()
    service.allowed = OPEN
    _expect_done(page)
    assert handle.evaluate("element => element.isConnected && element.textContent") == " of"


def test_pause_freezes_the_canvas_and_play_continues_to_the_newest_frame(open_page: Open, service: FakeService) -> None:
    service.allowed = 2
    page = open_page()
    _ask(page)
    expect(page.locator("#where")).to_have_text(f"step 1 of {NUM_STEPS}")
    page.click("#play")
    expect(page.locator("#play")).to_have_accessible_name("Play")
    service.allowed = OPEN
    _expect_done(page)
    expect(page.locator("#where")).to_have_text(f"step 1 of {NUM_STEPS}")
    expect(_canvas(page).locator(".slot.masked")).to_have_count(sum(step >= 1 for step in STEPS))
    page.click("#play")
    expect(page.locator("#where")).to_have_text(f"step {NUM_STEPS} of {NUM_STEPS}")
    expect(page.locator("#play")).to_have_accessible_name("Play")


def test_a_recording_can_be_stepped_and_replayed(open_page: Open) -> None:
    page = open_page()
    _ask(page)
    _expect_done(page)
    where, masked = page.locator("#where"), _canvas(page).locator(".slot.masked")
    expect(page.locator("#forward")).to_be_disabled()
    page.click("#back")
    expect(where).to_have_text(f"step {NUM_STEPS - 1} of {NUM_STEPS}")
    expect(masked).to_have_count(1)
    page.click("#forward")
    expect(masked).to_have_count(0)
    page.locator("#position").fill("0")
    expect(where).to_have_text(f"step 0 of {NUM_STEPS}")
    expect(masked).to_have_count(len(TEXTS))
    expect(page.locator("#back")).to_be_disabled()
    page.click("#play")
    expect(masked).to_have_count(0)
    page.click("#play")
    expect(page.locator("#play")).to_have_accessible_name("Pause")
    expect(where).to_have_text(f"step {NUM_STEPS} of {NUM_STEPS}")


def test_hover_and_focus_show_step_and_confidence(open_page: Open) -> None:
    page = open_page()
    _ask(page)
    _expect_done(page)
    tip = page.locator(".tip")
    expect(tip).to_be_hidden()
    _canvas(page).locator(".slot").nth(1).hover()
    expect(tip).to_contain_text("slot 2 of 9")
    expect(tip).to_contain_text("step 3 of 5")
    expect(tip).to_contain_text("confidence 92.0 %")
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    page.focus(".column footer button")
    page.keyboard.press("Shift+Tab")
    expect(_canvas(page)).to_be_focused()
    page.keyboard.press("End")
    expect(tip).to_contain_text("slot 9 of 9")
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text("slot 8 of 9")
    active = _canvas(page).get_attribute("aria-activedescendant")
    expect(page.locator(f"#{active}")).to_have_accessible_name("Slot 8:  5, step 4, confidence 50.0 %")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_colours_follow_step_or_confidence(open_page: Open, service: FakeService) -> None:
    texts, steps = ("a", "b", "c"), (0, 9, 5)
    service.answers["policy"] = frames(texts, steps)
    for frame in service.answers["policy"]:
        for slot, confidence in zip(frame["slots"], (0.05, 0.55, 0.31), strict=True):
            slot["confidence"] = None if slot["masked"] else confidence
    page = open_page()
    _ask(page)
    _expect_done(page)
    shades = [_canvas(page).locator(".slot").nth(index) for index in range(3)]
    for shade, name in zip(shades, ("shade-0", "shade-9", "shade-5"), strict=True):
        expect(shade).to_have_class(re.compile(rf"{name}\b"))
    page.check("[name=colour][value=confidence]")
    # The scale spans the least to the greatest value: a policy's confidences may all be above 90 %.
    expect(page.locator(".scale")).to_have_text("5.0 %55.0 %")
    for shade, name in zip(shades, ("shade-0", "shade-9", "shade-5"), strict=True):
        expect(shade).to_have_class(re.compile(rf"{name}\b"))


def test_tokens_after_the_text_are_marked_and_neither_copied_nor_spoken(open_page: Open, service: FakeService) -> None:
    texts = ("5", " ", "😀", "", "<|user|>", "", "é", EOS, "x", EOS)
    service.answers["policy"], service.text = frames(texts, (0, 3, 1, 2, 1, 1, 2, 0, 0, 3)), "5 😀é"
    service.allowed = 4
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    _ask(page)
    slot = _canvas(page).locator(".slot")
    expect(slot.nth(7)).to_have_accessible_name(f"Slot 8: {EOS}, step 1, confidence 50.0 %")
    expect(slot.nth(7)).to_have_class(re.compile("outside"))
    service.allowed = OPEN
    _expect_done(page)
    expect(page.locator("#announcement")).to_have_text("policy: 5 😀é")
    page.click("text=Copy text")
    expect(page.locator(".column footer button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "5 😀é"
    expect(slot.nth(2)).to_have_accessible_name("Slot 3: 😀, step 2, confidence 85.0 %")
    expect(slot.nth(3)).to_have_accessible_name("Slot 4: rest of the character before, step 3, confidence 78.0 %")
    expect(slot.nth(4)).to_have_accessible_name("Slot 5: <|user|>, not part of the text, step 2, confidence 71.0 %")
    expect(slot.nth(7)).to_have_accessible_name(f"Slot 8: {EOS}, after the text, step 1, confidence 50.0 %")
    expect(page.locator("#where")).to_have_text("step 4 of 4")
    assert slot.evaluate_all("slots => slots.map((slot) => slot.matches('.outside'))") == [
        *(False, False, False, False, True, False, False),
        *(True, True, True),
    ]
    slot.nth(8).hover()
    expect(page.locator(".tip")).to_contain_text("step 1 of 4")
    expect(page.locator(".tip")).to_contain_text("it is after the text")
    page.click("#back")
    expect(page.locator(".slot.masked")).to_have_count(2)
    expect(page.locator(".slot.outside")).to_have_count(3)


def test_an_empty_answer_is_announced(open_page: Open, service: FakeService) -> None:
    service.answers["policy"], service.text = frames((EOS, EOS), (0, 1)), ""
    page = open_page()
    _ask(page)
    _expect_done(page)
    expect(page.locator("#announcement")).to_have_text("policy: no text")
    expect(page.locator("text=Copy text")).to_be_hidden()


def test_base_and_policy_get_the_same_prompt_side_by_side(open_page: Open, service: FakeService) -> None:
    service.answers["base"] = frames(("No", " idea"), (0, 1))
    page = open_page()
    page.check("#compare")
    page.locator("#options summary").click()
    page.fill("#seed", "7")
    _ask(page)
    _expect_done(page, 0)
    _expect_done(page, 1)
    expect(page.locator(".column h3")).to_have_text(["base · version 1", "policy · version 12"])
    expect(_canvas(page, 0)).to_have_text("No idea")
    expect(_canvas(page, 1)).to_have_text(SENTENCE)
    boxes = [page.locator(".column").nth(index).bounding_box() for index in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    asked = sorted(service.requests, key=lambda body: body["model"])
    assert [body.pop("model") for body in asked] == ["base", "policy"]
    assert asked[0] == asked[1]
    assert asked[0]["seed"] == 7
    page.locator("#position").fill("1")
    expect(_canvas(page, 0).locator(".masked")).to_have_count(1)
    expect(_canvas(page, 1).locator(".masked")).to_have_count(sum(step >= 1 for step in STEPS))


def test_the_picker_offers_the_services_models_and_follows_them(open_page: Open, service: FakeService) -> None:
    page = open_page()
    options = page.locator("#model option")
    expect(options).to_have_text(["policy (newest)", "base", "version 12", "version 11"])
    page.select_option("#model", "policy@v000011")
    service.models.insert(1, "policy@v000013")
    service.policy_events.append(("serving", {"version": 13, "round": 12, "time_s": 70.0}))
    expect(options).to_have_text(["policy (newest)", "base", "version 13", "version 12", "version 11"])
    _ask(page)
    _expect_done(page)
    assert service.requests[0]["model"] == "policy@v000011"


def test_only_options_that_were_filled_in_are_sent(open_page: Open, service: FakeService) -> None:
    page = open_page()
    _ask(page, "one")
    _expect_done(page)
    page.locator("#options summary").click()
    given = {
        "temperature": "0.5",
        "max_tokens": "64",
        "steps": "8",
        "block_length": "16",
        "threshold": "0.9",
        "seed": "0",
    }
    for name, value in given.items():
        page.fill(f"#{name}", value)
    page.select_option("#format", "text")
    _ask(page, "two")
    _expect_done(page)
    common = {"model": "policy", "stream": True, "stream_options": {"include_usage": True}}
    assert service.requests == [
        {
            "path": "/v1/chat/completions",
            "messages": [{"role": "user", "content": "one"}],
            "diffusion": {"stream": "canvas"},
            **common,
        },
        {
            "path": "/v1/completions",
            "prompt": "two",
            "temperature": 0.5,
            "max_tokens": 64,
            "seed": 0,
            "diffusion": {"stream": "canvas", "steps": 8, "block_length": 16, "threshold": 0.9},
            **common,
        },
    ]


def test_two_models_get_the_same_plain_text(open_page: Open, service: FakeService) -> None:
    service.answers["base"] = frames(("No", " idea"), (0, 1))
    page = open_page()
    page.check("#compare")
    page.locator("#options summary").click()
    page.select_option("#format", "text")
    _ask(page, "2 + 3 =\n")
    _expect_done(page, 0)
    _expect_done(page, 1)
    assert sorted((body["model"], body["prompt"]) for body in service.requests) == [
        ("base", "2 + 3 =\n"),
        ("policy", "2 + 3 =\n"),
    ]


def test_invalid_input_is_reported_before_sending(open_page: Open, service: FakeService) -> None:
    page = open_page()
    _ask(page, "  ")
    expect(page.locator("#ask-error")).to_have_text("The prompt is empty.")
    page.locator("#options summary").click()
    page.fill("#threshold", "2")
    page.locator("#options summary").click()
    _ask(page)
    expect(page.locator("#ask-error")).to_contain_text("Threshold: ")
    expect(page.locator("#threshold")).to_be_focused()
    assert service.requests == []


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (None, "The stream ended before the answer was complete."),
        ({"message": "Its replica died.", "type": "server_error"}, "The service ended the stream. Its replica died."),
    ],
)
def test_a_broken_stream_shows_an_error_and_the_partial_answer(
    open_page: Open, service: FakeService, event: dict[str, str] | None, said: str
) -> None:
    service.breaks_after, service.breaks_with = 3, event
    page = open_page()
    _ask(page)
    alert = page.locator(".column [role=alert]")
    expect(alert).to_have_text(f"{said} What you see is not the whole answer.")
    expect(page.locator(".state")).to_contain_text("broken")
    expect(_canvas(page).locator(".slot:not(.masked)")).to_have_count(sum(step < 2 for step in STEPS))
    expect(page.locator("#stop")).to_be_hidden()
    page.click("#back")
    expect(page.locator("#where")).to_have_text(f"step 1 of {NUM_STEPS}")


def test_a_broken_column_does_not_affect_the_other(open_page: Open, service: FakeService) -> None:
    service.answers["base"] = [*frames(("a", "b"), (0, 1))[:1], {"step": 1, "num_steps": 2, "slots": [None, None]}]
    page = open_page()
    page.check("#compare")
    _ask(page)
    _expect_done(page, 1)
    expect(page.locator(".column").nth(0).locator(".state")).to_contain_text("broken")
    expect(_canvas(page, 1)).to_have_text(SENTENCE)


@pytest.mark.parametrize(
    ("status", "error", "headers", "said"),
    [
        (400, {"message": "`steps` is at most 64.", "param": "diffusion.steps"}, {}, "`steps` is at most 64."),
        (429, {"message": "full"}, {"retry-after": "3"}, "The service is busy; try again in 3 s."),
        (503, {"message": "No replica is up."}, {}, "The service failed (503). No replica is up."),
    ],
)
def test_a_refusal_is_shown_in_plain_words(
    open_page: Open, service: FakeService, status: int, error: dict[str, str], headers: dict[str, str], said: str
) -> None:
    service.refusal = (status, error, headers)
    page = open_page(expected=(NETWORK,))
    _ask(page)
    expect(page.locator(".column [role=alert]")).to_have_text(said)


def test_stop_ends_the_request_and_keeps_the_partial_answer(open_page: Open, service: FakeService) -> None:
    service.allowed = 3
    page = open_page()
    _ask(page)
    expect(page.locator("#where")).to_have_text(f"step 2 of {NUM_STEPS}")
    page.click("#stop")
    expect(page.locator(".state")).to_contain_text("stopped")
    expect(page.locator(".column [role=alert]")).to_be_hidden()
    expect(_canvas(page).locator(".slot:not(.masked)")).to_have_count(sum(step < 2 for step in STEPS))
    _wait_until(page, lambda: service.num_gone == 1)


def test_a_new_prompt_ends_the_previous_request(open_page: Open, service: FakeService) -> None:
    service.allowed = 3
    page = open_page()
    _ask(page, "one")
    expect(page.locator("#where")).to_have_text(f"step 2 of {NUM_STEPS}")
    service.answers["policy"] = frames(("new",), (0,))
    _ask(page, "two")
    _wait_until(page, lambda: service.num_gone == 1)
    service.allowed = OPEN
    _expect_done(page)
    expect(_canvas(page)).to_have_text("new")
    expect(page.locator(".column")).to_have_count(1)


def test_a_missing_or_wrong_key_is_reported(open_page: Open, service: FakeService) -> None:
    page = open_page(has_key=False, expected=(NETWORK,))
    expect(page.locator("#key")).to_be_focused()
    assert {path for path in service.paths if path.startswith("/v1")} == set()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_have_text("The service does not accept this key.")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#key-panel")).to_be_hidden()
    expect(page.locator("#prompt")).to_be_focused()
    _ask(page)
    _expect_done(page)


def test_a_service_that_starts_later_is_found(open_page: Open, service: FakeService) -> None:
    page = open_page(has_key=False, expected=(NETWORK,))
    page.route("**/v1/**", lambda route: route.abort())
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#serving")).to_have_text("not reachable")
    page.unroute("**/v1/**")
    expect(page.locator("#serving")).to_have_text("version 12 · up to date")
    expect(page.locator("#model option")).to_have_count(4)
    _ask(page)
    _expect_done(page)


def test_the_printed_link_sets_the_key_and_removes_it_from_the_url(
    open_page: Open, service: FakeService, url: str
) -> None:
    page = open_page(f"/#key={KEY}", has_key=False)
    expect(page.locator("#key-panel")).to_be_hidden()
    _ask(page)
    _expect_done(page)
    assert page.url == f"{url}/"
    assert page.evaluate("history.length") == 2, "the blank page, and this one without the key"
    assert not any(KEY in query for query in service.queries)
    assert page.evaluate("sessionStorage.getItem('d1.key')") == KEY


def test_a_link_with_the_key_works_in_an_open_tab(open_page: Open, url: str) -> None:
    page = open_page(has_key=False)
    expect(page.locator("#key")).to_be_focused()
    page.evaluate(f"location.hash = 'key={KEY}'")
    expect(page.locator("#key-panel")).to_be_hidden()
    assert page.url == f"{url}/"


def test_the_key_is_only_in_session_storage(open_page: Open, service: FakeService) -> None:
    page = open_page(has_key=False)
    page.fill("#key", KEY)
    page.click("text=Use this key")
    _ask(page)
    _expect_done(page)
    assert KEY not in page.url
    assert not any(KEY in query for query in service.queries)
    assert page.evaluate("document.documentElement.outerHTML").find(KEY) == -1
    assert page.evaluate("[document.cookie, JSON.stringify(localStorage)]") == ["", "{}"]
    assert page.evaluate("sessionStorage.getItem('d1.key')") == KEY
    page.click("#key-toggle")
    page.click("#key-forget")
    expect(page.locator("#key")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0


def test_finished_text_is_announced_once_and_frames_are_not(open_page: Open, service: FakeService) -> None:
    service.allowed = 1
    page = open_page()
    page.evaluate(
        """() => {
          window.said = [];
          for (const live of document.querySelectorAll("[aria-live]")) {
            new MutationObserver(() => live.textContent && window.said.push(live.textContent))
              .observe(live, {childList: true, characterData: true, subtree: true});
          }
        }"""
    )
    _ask(page)
    for allowed in range(2, NUM_STEPS + 1):
        service.allowed = allowed
        expect(page.locator("#where")).to_have_text(f"step {allowed - 1} of {NUM_STEPS}")
    assert page.evaluate("window.said") == []
    service.allowed = OPEN
    _expect_done(page)
    expect(page.locator("#announcement")).to_have_text(f"policy: {SENTENCE}")
    assert page.evaluate("window.said") == [f"policy: {SENTENCE}"]
    inside = page.locator("[aria-live] .canvas, .canvas[aria-live], .canvas [aria-live]")
    expect(inside).to_have_count(0)


def test_everything_works_with_the_keyboard(open_page: Open) -> None:
    page = open_page(has_key=False)
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("What is 2 + 3?")
    expect(page.locator("#chips button")).to_have_count(2)
    for selector in ("#chips button >> nth=0", "#chips button >> nth=1", "#model", "#steps", "#compare"):
        page.keyboard.press("Tab")
        expect(page.locator(selector)).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator("#compare")).to_be_checked()
    page.keyboard.press("Tab")
    expect(page.locator("#ask")).to_be_focused()
    page.keyboard.press("Enter")
    _expect_done(page, 1)
    expect(page.locator("#where")).to_have_text(f"step {NUM_STEPS} of {NUM_STEPS}")
    _tab_to(page, "#back")
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_have_text(f"step {NUM_STEPS - 1} of {NUM_STEPS}")
    _tab_to(page, "#position")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#where")).to_have_text(f"step {NUM_STEPS - 2} of {NUM_STEPS}")
    _tab_to(page, "[name=colour]:checked")
    page.keyboard.press("ArrowRight")
    expect(page.locator("[value=confidence]")).to_be_checked()
    _tab_to(page, "#canvas-0")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tip")).to_contain_text("slot 2 of 9")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_the_task_is_described_and_its_problems_are_clickable(open_page: Open, service: FakeService) -> None:
    service.examples = {"task": "sums", "prompts": ["1 + 2", "two\nlines", *map(str, range(9))]}
    page = open_page()
    about = page.locator("#about")
    expect(about).to_have_text("The policy of tiny, trained on sums, solves 73.7 % of its held-out problems.")
    expect(page.locator("#chips button")).to_have_count(6)
    page.click("#chips button >> nth=1")
    _expect_done(page)
    expect(page.locator("#prompt")).to_have_value("two\nlines")
    (asked,) = service.requests
    assert (asked["path"], asked["messages"][0]["content"]) == ("/v1/chat/completions", "two\nlines")


def test_a_checkpoint_without_a_run_shows_prompts_of_its_model_card(open_page: Open, service: FakeService) -> None:
    service.examples = {"task": None, "prompts": []}
    page = open_page()
    _ask(page)
    _expect_done(page)
    expect(page.locator("#chips")).to_be_hidden()
    service.examples = {"task": None, "prompts": ["Write a story about a fox."]}
    page.reload()
    page.click("text=Write a story about a fox.")
    _expect_done(page)
    assert service.requests[-1]["messages"][0]["content"] == "Write a story about a fox."
    expect(page.locator("#about")).to_be_hidden()


def test_cells_stay_where_they_are_while_they_fill(open_page: Open, service: FakeService) -> None:
    texts = ("a", " longer", " a very long token of thirty chars", "\n", "")
    service.answers["policy"] = frames(texts * 4, (0, 3, 1, 2, 2) * 4)
    service.allowed = 1
    page = open_page()
    _ask(page)
    places = "slots => slots.map((slot) => slot.getBoundingClientRect()).map((at) => [at.left, at.top, at.width])"
    slots = _canvas(page).locator(".slot")
    expect(slots).to_have_count(20)
    before = slots.evaluate_all(places)
    assert before[0][2] > 50
    service.allowed = OPEN
    _expect_done(page)
    expect(page.locator(".slot.masked")).to_have_count(0)
    assert slots.evaluate_all(places) == before
    expect(page.locator(".column .text")).to_have_text("".join(texts * 4))


def test_a_sudoku_is_a_grid_that_fills(open_page: Open, service: FakeService) -> None:
    tag, end = "<answer>", "</answer>"
    # The last given digit is changed.
    service.answers["policy"] = frames((tag, *"2431134332144122", end), (1, *[0, 1] * 8, 2))
    service.allowed = 2
    page = open_page()
    _ask(page, "2001104002144103")
    cells = page.locator(".sudoku span")
    expect(cells).to_have_count(16)
    expect(page.locator(".sudoku .masked")).to_have_count(3)
    expect(cells.nth(2)).to_have_text("3")
    service.allowed = OPEN
    _expect_done(page)
    expect(page.locator(".sudoku .masked")).to_have_count(0)
    expect(page.locator(".sudoku")).to_have_text("2431134332144122")
    expect(page.locator(".sudoku .given")).to_have_count(10)
    expect(page.locator(".sudoku .changed")).to_have_count(1)
    expect(page.locator(".sudoku")).to_have_accessible_name("Sudoku, row after row: 2 4 3 1 1 3 4 3 3 2 1 4 4 1 2 2")


def test_an_answer_between_tags_is_shown_separately(open_page: Open, service: FakeService) -> None:
    service.answers["policy"] = frames(("so ", "<answer>", "3*4", "-2", "</answer>"), (0, 1, 2, 3, 4))
    page = open_page()
    _ask(page, "3 4 2 make 10")
    _expect_done(page)
    expect(page.locator(".answer .said")).to_have_text("3*4-2")


def test_on_a_phone_the_answer_scrolls_into_view(open_page: Open) -> None:
    page = open_page(viewport={"width": 390, "height": 640})
    _ask(page)
    _expect_done(page)
    expect(page.locator(".column h3")).to_be_in_viewport()


def test_ctrl_enter_asks(open_page: Open) -> None:
    page = open_page()
    page.fill("#prompt", "What is 2 + 3?")
    page.press("#prompt", "Control+Enter")
    _expect_done(page)


def _tab_to(page: Page, selector: str, limit: int = 25) -> None:
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def _wait_until(page: Page, condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        page.wait_for_timeout(10)
    raise AssertionError("it did not happen")


def _renoised() -> list[dict[str, object]]:
    """Canvases of a renoising policy: each step keeps some slots, and the number of steps is not announced."""
    steps = (
        ("", "", "", ""),
        ("A", " b", "", ""),
        ("", " b", " c", ""),
        ("", " d", " c", ""),
        ("An", " end", " it", "."),
    )
    return [
        {
            "step": step,
            "num_steps": None,
            "slots": [
                {
                    "text": text,
                    "masked": text == "",
                    "step": step - 1 if text else -1,
                    "confidence": 0.5 if text else None,
                }
                for text in texts
            ],
        }
        for step, texts in enumerate(steps)
    ]


def test_renoised_slots_are_shown_live_and_in_the_replay(open_page: Open, service: FakeService) -> None:
    service.answers["policy"], service.allowed = _renoised(), 1
    page = open_page()
    _ask(page)
    slots, lost = _canvas(page).locator(".slot"), _canvas(page).locator(".slot.masked.lost")
    expect(slots).to_have_count(4)
    expect(lost).to_have_count(0)
    service.allowed = 2
    expect(slots.nth(0)).to_have_text("A")
    service.allowed = 3
    expect(lost).to_have_count(1)
    expect(slots.nth(0)).to_have_accessible_name("Slot 1: masked again, it was A")
    expect(slots.nth(3)).to_have_accessible_name("Slot 4: masked")
    service.allowed = 4
    expect(slots.nth(1)).to_have_text(" d")
    expect(slots.nth(1)).to_have_class(re.compile(r"\bnew\b"))
    expect(slots.nth(2)).not_to_have_class(re.compile(r"\bnew\b"))
    expect(lost).to_have_count(1)
    service.allowed = OPEN
    _expect_done(page)
    expect(_canvas(page)).to_have_text("An end it.")
    expect(lost).to_have_count(0)
    # In any order: each frame itself says which tokens were taken back.
    for position, num_lost in ((3, 1), (1, 0), (2, 1), (0, 0)):
        page.locator("#position").fill(str(position))
        expect(page.locator("#where")).to_have_text(f"step {position}")
        expect(lost).to_have_count(num_lost)
    page.locator("#position").fill("3")
    slots.nth(0).hover()
    expect(page.locator(".tip")).to_contain_text("masked again, it was A")
    assert slots.nth(0).evaluate("one => getComputedStyle(one).borderTopStyle") == "dashed"
    assert slots.nth(3).evaluate("one => getComputedStyle(one).borderTopStyle") == "none"
