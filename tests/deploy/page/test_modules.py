"""The page's JavaScript modules against slow reference implementations in Python."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from deploy.printing import duration, printable
from tests.deploy.page.fake_service import STEPS, TEXTS, frames

Open = Callable[..., Page]


@pytest.fixture
def page(open_page: Open) -> Page:
    return open_page()


def _slow_events(text: str) -> list[dict[str, str]]:
    """Parse the whole text at once."""
    events, data, name, last = [], [], "", ""
    lines = re.split(r"\r\n|\r|\n", text)
    for line in lines[:-1]:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line == "":
            if data:
                events.append({"event": name or "message", "data": "\n".join(data), "id": last})
            data, name = [], ""
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id":
            last = value
    return events


def test_events_are_parsed_the_same_for_any_chunking(page: Page) -> None:
    draw = random.Random(0)
    alphabet = [
        "data: a",
        "data:b",
        "data",
        "event: x",
        "id: 7",
        ": ping",
        "retry: 1",
        "",
        "",
        "\r",
        "\n",
        "\r\n",
        "😀",
    ]
    texts = [
        "".join(draw.choice(alphabet) + draw.choice(["\n", "\r\n", "\r"]) for _ in range(40)) + "\n" for _ in range(60)
    ]
    cuts = [sorted(draw.choices(range(len(text) + 1), k=8)) for text in texts]
    pieces = [
        [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
        for text, cut in zip(texts, cuts, strict=True)
    ]
    found = page.evaluate(
        """async (texts) => {
          const { EventParser } = await import("/assets/sse.js");
          return texts.map((pieces) => {
            const parser = new EventParser();
            return pieces.flatMap((piece) => parser.feed(piece));
          });
        }""",
        pieces,
    )
    assert found == [_slow_events(text) for text in texts]


def test_durations_equal_those_of_the_reports(page: Page) -> None:
    seconds = [0.04, 9.94, 10.0, 59.4, 60.0, 184.7, 3599.6, 7621.0]
    found = page.evaluate(
        """async (seconds) => seconds.map((await import("/assets/numbers.js")).duration)""",
        seconds,
    )
    assert found == [duration(value) for value in seconds]


def test_hostile_text_is_escaped_as_on_a_terminal(page: Page) -> None:
    # The joiners stay, for emoji. A lone surrogate cannot travel through JSON.
    kept = "\u200c\u200d"
    text = "".join(map(chr, [*range(0x3000), *range(0xFDD0, 0x10000), 0x1F600, 0xE0001, 0xE007F]))
    found = page.evaluate("""async (text) => (await import("/assets/dom.js")).visible(text)""", text)
    assert found == "".join(char if char in kept else printable(char) for char in text)


def test_a_player_follows_new_frames_only_at_the_end(page: Page) -> None:
    found = page.evaluate(
        """async () => {
          const { Player } = await import("/assets/player.js");
          const shown = [];
          const player = new Player(() => shown.at(-1) !== player.position && shown.push(player.position));
          const seen = [];
          const note = () => seen.push([player.position, player.isPlaying]);
          const until = (position) => new Promise((resolve) => { const timer = setInterval(() => {
            if (player.position === position) { clearInterval(timer); resolve(); } }, 5); });
          player.reset(); note();
          const began = performance.now();
          player.grow(1); player.grow(4); note();
          await until(3); note();
          const tookMs = performance.now() - began;
          player.seek(1); player.grow(6); note();
          player.seek(99); player.grow(7); note();
          player.seek(-5); note();
          player.play(() => true);
          await until(6);
          note();
          player.grow(9); player.end(); note();
          await until(8); note();
          player.reset(); player.grow(1000);
          await until(999);
          return [seen, shown, tookMs];
        }"""
    )
    playing, paused = True, False
    seen, shown, took_ms = found
    assert seen == [
        [0, playing],
        [0, playing],
        [3, playing],
        [1, paused],
        [5, paused],
        [0, paused],
        [6, playing],
        [6, playing],
        [8, paused],
    ]
    assert shown[:4] == [0, 1, 2, 3], "each is seen"
    assert took_ms > 200
    jumps = shown[shown.index(999) - 5 : shown.index(999)]
    assert jumps == list(range(994, 999)), "who is far behind catches up in large steps, and ends in small ones"
    assert len(shown) < 120


def test_slots_after_the_text_are_recognized(page: Page) -> None:
    after, other = "after the text", "not part of the text"
    rows: list[tuple[list[str], str, list[str]]] = [
        (["a", " b"], "a b", ["", ""]),
        (["😀", "", "<end>", "", "x"], "😀", ["", "", after, after, after]),
        (["<end>", "a"], "", [after, after]),
        (["a", "<user>", "", "b"], "ab", ["", other, "", ""]),
        # A stop string inside a slot, and a limit of tokens.
        (["5 ", "abc", "d"], "5 a", ["", "", after]),
        (["a", "a", "a"], "aa", ["", "", after]),
        ([], "", []),
    ]
    found = page.evaluate(
        """async (rows) => {
          const { Recording } = await import("/assets/recording.js");
          return rows.map(([texts, text]) => {
            const recording = new Recording();
            const slots = texts.map((own) => ({ text: own, masked: false, step: 0, confidence: 1 }));
            recording.add({ step: 1, num_steps: 1, slots });
            const before = [recording.text, recording.notes];
            recording.end(text);
            return [before, [recording.text, recording.notes]];
          });
        }""",
        [row[:2] for row in rows],
    )
    assert found == [[["".join(texts), []], [text, notes]] for texts, text, notes in rows]


def test_a_recording_keeps_equal_slots_once_and_no_frame_twice(page: Page) -> None:
    chunks = frames(TEXTS, STEPS)
    found = page.evaluate(
        """async (chunks) => {
          const { Recording } = await import("/assets/recording.js");
          const recording = new Recording();
          [...chunks, chunks.at(-1)].forEach((chunk) => recording.add(structuredClone(chunk)));
          const all = recording.frames.flatMap((frame) => frame.slots);
          const last = recording.at(99).step;
          return [recording.frames.length, new Set(all).size, recording.text, last, recording.numSteps];
        }""",
        chunks,
    )
    # Frames share their slot objects: each slot has one while masked and one once committed.
    assert found == [len(chunks), 2 * len(TEXTS), "".join(TEXTS), max(STEPS) + 1, max(STEPS) + 1]
