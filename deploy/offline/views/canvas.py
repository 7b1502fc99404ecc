"""Canvas rendering: tokens coloured by confidence, and a block for each masked slot.

All functions are pure. Model output passes through `printable` into `Text`, which does not interpret markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from deploy.printing import printable
from rollout.batch_state import BatchState
from rollout.request import Completion

Decode = Callable[[Sequence[int]], str]

MASK_CHARACTER = "░"
SPECIAL_CHARACTER = "·"
_MASK_STYLE, _GIVEN_STYLE = "dim", "bold"
# From low to high probability at commit. They can be told apart with red-green colour blindness.
_CONFIDENCE_STYLES = ("red", "dark_orange", "yellow", "green", "bright_cyan")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasView:
    """Completion slots of one request; all fields have length [L]."""

    token_ids: Sequence[int]
    """Tokens of the slots; undefined where masked."""
    masked: Sequence[bool]
    """Slots that are not committed yet."""
    steps: Sequence[int]
    """Denoise step that committed each slot; -1 for fixed tokens."""
    probabilities: Sequence[float]
    """Probability of each token at temperature 1, when it was committed."""

    @property
    def num_committed(self) -> int:
        """Slots that hold a token."""
        return len(self.masked) - sum(self.masked)


def canvas_in(state: BatchState, row: int = 0) -> CanvasView:
    """Return the canvas that is being denoised in an engine slot (`row`)."""
    start, end = int(state.rows.prompt_length[row]), int(state.rows.end[row])
    canvases = state.canvases
    return CanvasView(
        token_ids=canvases.tokens[row, start:end].tolist(),
        masked=canvases.masked[row, start:end].tolist(),
        steps=canvases.step_map[row, start:end].tolist(),
        probabilities=canvases.logp_raw[row, start:end].exp().tolist(),
    )


def canvas_of(completion: Completion) -> CanvasView:
    """Return the canvas of a completion, up to its end."""
    end = completion.num_tokens
    return CanvasView(
        token_ids=completion.token_ids[:end].tolist(),
        masked=[False] * end,
        steps=completion.step_map[:end].tolist(),
        probabilities=[math.exp(logp) for logp in completion.commit_logp_raw[:end].tolist()],
    )


def canvas_text(canvas: CanvasView, decode: Decode, *, special: str = "") -> Text:
    """Render a canvas as coloured text; `special` stands for a token without text, such as the end of text."""
    return Text.assemble(*((text or special, style) for text, style in _pieces(canvas, decode)))


def legend() -> Text:
    """Return a one-line legend of the colours."""
    names = [*(f"<{20 * bound}%" for bound in range(1, len(_CONFIDENCE_STYLES))), "more"]
    parts: list[tuple[str, str]] = [("probability ", "dim")]
    for name, style in zip(names, _CONFIDENCE_STYLES, strict=True):
        parts += [("■", style), (f" {name}  ", "dim")]
    return Text.assemble(*parts, (f"{MASK_CHARACTER} masked  {SPECIAL_CHARACTER} special", "dim"))


def window(lines: Sequence[Text], height: int) -> Sequence[Text]:
    """Return at most `height` lines: those around the first masked slot, or the last ones."""
    if len(lines) <= height:
        return lines
    masked = (index for index, line in enumerate(lines) if MASK_CHARACTER in line.plain)
    first = next(masked, len(lines)) - height // 2
    first = min(max(first, 0), len(lines) - height)
    return lines[first : first + height]


def _pieces(canvas: CanvasView, decode: Decode) -> Iterable[tuple[str, str]]:
    """Yield each displayed piece with its style: a token, or several tokens that share a character."""
    index = 0
    while index < len(canvas.masked):
        if canvas.masked[index]:
            yield MASK_CHARACTER, _MASK_STYLE
            index += 1
            continue
        end, text = _character(canvas, index, decode)
        yield printable(text), _style(canvas, index, end)
        index = end


def _style(canvas: CanvasView, start: int, end: int) -> str:
    """Return the style of slots displayed as one piece, by their lowest confidence."""
    if max(canvas.steps[start:end]) < 0:
        return _GIVEN_STYLE
    probability, bounds = min(canvas.probabilities[start:end]), range(1, len(_CONFIDENCE_STYLES))
    return _CONFIDENCE_STYLES[sum(probability * len(_CONFIDENCE_STYLES) >= bound for bound in bounds)]


def _character(canvas: CanvasView, start: int, decode: Decode) -> tuple[int, str]:
    """Return the next slot and the text of this one. Several tokens may be the bytes of one character."""
    alone = decode(canvas.token_ids[start : start + 1])
    if _REPLACEMENT not in alone:
        return start + 1, alone
    for end in range(start + 2, min(start + _LONGEST_CHARACTER, len(canvas.masked)) + 1):
        if canvas.masked[end - 1]:
            break
        text = decode(canvas.token_ids[start:end])
        if _REPLACEMENT not in text:
            return end, text
    return start + 1, alone
