"""The first d1's training rewards for maths, defects included.

From `diffu-grpo/reward_func.py` and `math500_utils.py`. Its format expressions do not match across line ends, its tag
count penalizes length by accident, and its search for a box contains a backspace character. These are kept, so that
curves can be compared. Time is linear in the length of the text.
"""

from __future__ import annotations

import re

from rewards.first_d1.maths import equivalent
from rewards.first_d1.parsers import boxed

_SEAM = re.compile(r"</reasoning>\s*+<answer>")
_TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]


def gsm8k_parts(text: str, gold: str) -> dict[str, float]:
    """Return the five rewards of GSM8K: at most 4.0 in total, negative for long texts. `gold` is compared as a
    string."""
    answer = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return {
        "xml_count": _xml_count(text),
        "soft_format": 0.5 * _is_softly_formatted(text),
        "strict_format": 0.5 * _is_strictly_formatted(text),
        "integer": 0.5 * answer.isdigit(),
        "correct": 2.0 * (answer == gold),
    }


def math_parts(text: str, gold: str) -> dict[str, float]:
    """Return the two rewards of MATH: 2 for an answer that `is_equiv` accepts, and a format reward of 0.75 or 0.25.

    The format reward is 0.75 with an answer tag and 0.25 without. 1 and 0.5 were meant for a box, but the code searches
    for a backspace and `oxed`.
    """
    answer = boxed(text)
    _, tag, rest = text.partition("<answer>")
    inside = rest.partition("<answer>")[0].partition("</answer>")[0] if tag else text
    return {
        "correct": 2.0 * equivalent(text if answer is None else answer, gold),
        "format": 0.5 * (bool(tag) + (1.0 if "\boxed" in inside else 0.5)),
    }


def _xml_count(text: str) -> float:
    """Return 0.125 for each tag that occurs exactly once, minus 0.001 for each character after the last.

    Without a line end after `</answer>` the first of the two deductions is for the whole text.
    """
    count = 0.0
    if text.count("<reasoning>\n") == 1:
        count += 0.125
    if text.count("\n</reasoning>\n") == 1:
        count += 0.125
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        # `count` searches from the left, so occurrences that share a line end count once.
        *_, rest = text.split("\n</answer>\n")
        count -= len(rest) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        count -= (len(text.rpartition("\n</answer>")[2]) - 1) * 0.001
    return count


def _is_softly_formatted(text: str) -> bool:
    r"""Return whether `<reasoning>.*?</reasoning>\s*<answer>.*?</answer>` matches at the start, each `.*?` within its
    line."""
    if not text.startswith("<reasoning>"):
        return False
    first_line_end = _line_end(text, 0)
    searched = 0
    for seam in _SEAM.finditer(text, len("<reasoning>")):
        if seam.start() > first_line_end:
            break
        # If a search to the end of this line has already failed, later seams on it fail too.
        if seam.end() > searched:
            searched = _line_end(text, seam.end())
            if text.find("</answer>", seam.end(), searched) >= 0:
                return True
    return False


def _is_strictly_formatted(text: str) -> bool:
    """Return whether d1's strict format matches: four tags on their own lines, one line of reasoning, one of answer.

    Its `$` also accepts a second line end.
    """
    lines = text.split("\n", 8)
    return [*lines[:1], *lines[2:4], *lines[5:6]] == _TAGS and lines[6:] in ([""], ["", ""])


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end
