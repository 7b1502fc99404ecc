"""What a canvas looks like: its tokens, coloured by how sure or how early they are, and blocks where it is masked.

All of it is pure. A model's text is printed through `printable` into `Text`, which knows no markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.text import Text

from deploy.printing import printable
from rollout.request import Completion
from rollout.slots import Slots

Decode = Callable[[Sequence[int]], str]

MASK_CHARACTER = "░"
SPECIAL_CHARACTER = "·"
_MASK_STYLE, _GIVEN_STYLE = "dim", "bold"
# From unsure to sure, and from early to late: both also tell apart for people who do not see red and green.
_CONFIDENCE_STYLES = ("red", "dark_orange", "yellow", "green", "bright_cyan")
_STEP_STYLES = ("bright_cyan", "dodger_blue1", "medium_purple1", "hot_pink", "orange1")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4


class Colour(StrEnum):
    """What the colours of tokens say."""

    CONFIDENCE = "confidence"
    STEP = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasView:
    """The completion slots of one request, [L] each."""

    token_ids: Sequence[int]
    """What they hold; without meaning where masked."""
    masked: Sequence[bool]
    """Where nothing was committed yet."""
    steps: Sequence[int]
    """The denoise step that committed them; -1 where given."""
    probabilities: Sequence[float]
    """Of the tokens at temperature 1, when they were committed."""

    @property
    def num_committed(self) -> int:
        """Slots that hold a token."""
        return len(self.masked) - sum(self.masked)

    @property
    def num_steps(self) -> int:
        """Denoise steps up to the last that committed something here."""
        steps = (step for step, masked in zip(self.steps, self.masked, strict=True) if not masked)
        return max(steps, default=-1) + 1


def canvas_in(slots: Slots, row: int = 0) -> CanvasView:
    """The canvas that is being denoised in a slot of the engine."""
    start, end = int(slots.rows.prompt_length[row]), int(slots.rows.end[row])
    canvases = slots.canvases
    return CanvasView(
        token_ids=canvases.tokens[row, start:end].tolist(),
        masked=canvases.masked[row, start:end].tolist(),
        steps=canvases.step_map[row, start:end].tolist(),
        probabilities=canvases.logp_raw[row, start:end].exp().tolist(),
    )


def canvas_of(completion: Completion) -> CanvasView:
    """The canvas of a completion, up to its end."""
    end = completion.num_tokens
    return CanvasView(
        token_ids=completion.token_ids[:end].tolist(),
        masked=[False] * end,
        steps=completion.step_map[:end].tolist(),
        probabilities=[math.exp(logp) for logp in completion.commit_logp_raw[:end].tolist()],
    )


def canvas_text(canvas: CanvasView, decode: Decode, colour: Colour, *, special: str = "") -> Text:
    """The canvas as coloured text.

    Args:
        canvas: what to show.
        decode: the text of token ids, special tokens left out.
        colour: what the colours say.
        special: what is shown for a token that has no text, as the end of text.
    """
    return Text.assemble(*((text or special, style) for text, style in _pieces(canvas, decode, colour)))


def legend(colour: Colour, num_steps: int) -> Text:
    """What the colours mean, in one line."""
    if colour is Colour.CONFIDENCE:
        names = [*(f"<{20 * bound}%" for bound in range(1, len(_CONFIDENCE_STYLES))), "more"]
        title, swatches = "probability", list(zip(names, _CONFIDENCE_STYLES, strict=True))
    else:
        title, swatches = "step", [(f"{first}-", style) for first, style in _step_swatches(num_steps)]
    parts: list[tuple[str, str]] = [(f"{title} ", "dim")]
    for name, style in swatches:
        parts += [("■", style), (f" {name}  ", "dim")]
    return Text.assemble(*parts, (f"{MASK_CHARACTER} masked  {SPECIAL_CHARACTER} special", "dim"))


def window(lines: Sequence[Text], height: int) -> Sequence[Text]:
    """At most `height` lines: where the first masked slots are, or the last ones."""
    if len(lines) <= height:
        return lines
    masked = (index for index, line in enumerate(lines) if MASK_CHARACTER in line.plain)
    first = next(masked, len(lines)) - height // 2
    first = min(max(first, 0), len(lines) - height)
    return lines[first : first + height]


def _step_swatches(num_steps: int) -> Iterable[tuple[int, str]]:
    """The first step of each colour."""
    seen: dict[str, int] = {}
    for step in range(num_steps):
        seen.setdefault(_step_style(step, num_steps), step)
    return [(step, style) for style, step in seen.items()]


def _step_style(step: int, num_steps: int) -> str:
    return _STEP_STYLES[step * len(_STEP_STYLES) // max(1, num_steps)]


def _confidence_style(probability: float) -> str:
    bounds = range(1, len(_CONFIDENCE_STYLES))
    return _CONFIDENCE_STYLES[sum(probability * len(_CONFIDENCE_STYLES) >= bound for bound in bounds)]


def _pieces(canvas: CanvasView, decode: Decode, colour: Colour) -> Iterable[tuple[str, str]]:
    """What is shown as one, a token or several that share a character, and its style."""
    num_steps, index = canvas.num_steps, 0
    while index < len(canvas.masked):
        if canvas.masked[index]:
            yield MASK_CHARACTER, _MASK_STYLE
            index += 1
            continue
        end, text = _character(canvas, index, decode)
        yield printable(text), _style(canvas, index, end, colour, num_steps)
        index = end


def _style(canvas: CanvasView, start: int, end: int, colour: Colour, num_steps: int) -> str:
    """Of slots that are shown as one: the latest of them, the least sure."""
    step = max(canvas.steps[start:end])
    if step < 0:
        return _GIVEN_STYLE
    if colour is Colour.STEP:
        return _step_style(step, num_steps)
    return _confidence_style(min(canvas.probabilities[start:end]))


def _character(canvas: CanvasView, start: int, decode: Decode) -> tuple[int, str]:
    """The text that begins at a slot, and the slot after it: tokens may be bytes of one character."""
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
