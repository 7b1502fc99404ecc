"""`d1 sample` of one prompt: the canvas on a terminal, and only the text elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.text import Text

from deploy.offline.sample import prompt
from deploy.offline.views.canvas import MASK_CHARACTER, CanvasView, canvas_in, canvas_text, legend, window
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler
from tests.deploy.offline.sample.asking import Screen


def test_a_prompt_that_is_piped_prints_the_text_alone(d1: Callable, checkpoints: Path) -> None:
    words = ["What is 2?", "gen_length=16"]
    (as_json,) = d1("sample", str(checkpoints / "with"), *words, "--json").out.splitlines()
    ended = d1("sample", str(checkpoints / "with"), *words)
    assert ended.status == 0
    assert ended.out == prompt.printable(json.loads(as_json)["text"]) + "\n"
    assert ended.err.startswith("16 tokens, 8 forwards, 2.0 tokens a forward, ")
    assert ended.err.count("\n") == 1


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> str:
    """The text to which the tokenizer decodes every completion."""
    text = "[bold red]x[/] \x1b]0;owned\x07 \u202eright"
    monkeypatch.setattr(ChatTokenizer, "decode", lambda self, ids: text)
    return text


def test_hostile_text_is_shown_harmless_and_markup_as_it_is(
    hostile: str, ask: Callable, d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "[bold red]x[/] \\u001b]0;owned\\u0007 \\u202eright"
    assert d1("sample", str(checkpoints / "with"), "hi", "gen_length=8").out == shown + "\n"
    request = {"prompt": "hi", "id": "\x1b[2J", "gen_length": 8}
    assert ask([request]).lines[0]["text"] == hostile
    raw = d1("sample", str(checkpoints / "with"), "--requests", "requests.jsonl", "--json").out
    assert raw.isascii()
    assert "\x1b" not in raw
    out = d1("sample", str(checkpoints / "with"), "--requests", "requests.jsonl").out
    assert out.startswith("--- request 0 (line 1) \\u001b[2J: 8 tokens")
    assert out.endswith(shown + "\n")
    canvas = CanvasView(token_ids=[1], masked=[False], steps=[0], probabilities=[0.5])
    assert canvas_text(canvas, lambda ids: hostile).plain == shown


def test_on_a_terminal_the_canvas_fills_in(d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(prompt, "_LEAST_FRAME_S", 0.0)
    monkeypatch.setattr(sys, "stdout", screen)
    ended = d1("sample", str(checkpoints / "with"), "What is 2?", "gen_length=16")
    assert ended.status == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert [f"step {step}, {2 * step} of at most 16 tokens" in shown for step in range(9)] == [True] * 9
    assert f"{MASK_CHARACTER * 16}" in shown
    assert "probability ■ <20%" in shown
    assert "\x1b[?25h" in screen.getvalue()


def test_the_shown_canvas_is_the_current_batch_state(checkpoints: Path) -> None:
    policy = load_policy(checkpoints / "with")
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0)
    running = Sampler(policy, 0).open([Request(prompt_ids=(5, 6, 7), params=params, seed=0)])
    canvases = []
    completion = None
    while completion is None:
        done = running.step()
        canvases.append(canvas_in(running.state))
        completion = done[0][1] if done else None
    assert [canvas.num_committed for canvas in canvases] == list(range(2, 18, 2))
    assert canvases[-1].token_ids == completion.token_ids.tolist()
    assert canvases[-1].steps == completion.step_map.tolist()
    assert torch.tensor(canvases[-1].probabilities).log().tolist() == pytest.approx(
        completion.commit_logp_raw.tolist(), abs=1e-5
    )
    for step, canvas in enumerate(canvases):
        assert canvas.masked == [committed > step for committed in completion.step_map.tolist()]


def _decode(ids: Any) -> str:
    return bytes(token for token in ids if token).decode("utf-8", errors="replace")


def test_a_colour_shows_the_probability_of_a_token() -> None:
    canvas = CanvasView(
        token_ids=[65, 66, 67, 0, 68, 0],
        masked=[False, False, False, True, False, False],
        steps=[0, 4, 2, -1, -1, 3],
        probabilities=[0.1, 0.99, 0.5, 0.0, 1.0, 0.3],
    )
    sure = canvas_text(canvas, _decode, special="·")
    assert sure.plain == f"ABC{MASK_CHARACTER}D·"
    assert [str(span.style) for span in sure.spans] == ["red", "bright_cyan", "yellow", "dim", "bold", "dark_orange"]
    assert canvas_text(canvas, _decode).plain == f"ABC{MASK_CHARACTER}D"
    assert legend().plain.startswith("probability ■ <20%  ■ <40%")


def test_tokens_that_are_bytes_of_one_character_are_shown_as_it() -> None:
    ids = [*"é".encode(), 65, *"日".encode()]
    canvas = CanvasView(token_ids=ids, masked=[False] * 6, steps=[0, 1, 2, 3, 4, 5], probabilities=[0.9] * 6)
    assert canvas_text(canvas, _decode).plain == "éA日"
    masked = [False, True, False, False, False, False]
    torn = CanvasView(token_ids=ids, masked=masked, steps=[0] * 6, probabilities=[0.9] * 6)
    assert canvas_text(torn, _decode).plain == f"\ufffd{MASK_CHARACTER}A日"


def test_a_tall_canvas_is_scrolled_to_the_first_masked_slot() -> None:
    lines = [Text(str(index)) for index in range(10)] + [Text(MASK_CHARACTER)] * 5
    assert window(lines, 20) == lines
    assert [line.plain for line in window(lines, 4)] == ["8", "9", MASK_CHARACTER, MASK_CHARACTER]
    assert [line.plain for line in window(lines[:10], 3)] == ["7", "8", "9"]


def test_ctrl_c_shows_the_canvas_so_far(d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.sampler import SlotBatch

    steps = iter(range(100))
    real = SlotBatch.step

    def step(self: SlotBatch) -> Any:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(SlotBatch, "step", step)
    ended = d1("sample", str(checkpoints / "with"), "hi", "gen_length=16")
    assert ended.status == 130
    assert ended.out.count(MASK_CHARACTER) == 10
    assert ended.err == "stopped after 3 steps, 6 tokens committed\n"
