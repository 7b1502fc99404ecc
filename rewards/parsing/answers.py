"""Extraction of the final answer from a completion: `<answer>` tags and boxes."""

from __future__ import annotations

import re

from rewards.parsing.boxed import last_boxed

_OPEN, _CLOSE = "<answer>", "</answer>"
_NOT_A_DIGIT = re.compile(r"[^0-9]+")


def last_answer(text: str) -> str | None:
    """Return the stripped text of the last closed `<answer>...</answer>` of a completion; None if there is none.

    As in d1's countdown and sudoku rewards (`diffu-grpo/reward_func.py`, `extract_solution`): pairs are matched from
    left to right, an answer that is never closed is ignored, and an `<answer>` inside an open answer is part of its
    text. An empty pair gives the empty string. Takes time linear in the length of `text`.
    """
    answer = last_tagged(text)
    return None if answer is None else answer.strip()


def last_tagged(text: str) -> str | None:
    """Return the same as `last_answer`, with its surrounding white space."""
    # d1's regular expression takes quadratic time on a text with many `<answer>` and no `</answer>`.
    answer: str | None = None
    start = text.find(_OPEN)
    while start >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            break
        answer = text[start:end]
        start = text.find(_OPEN, end + len(_CLOSE))
    return answer


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a completion, whichever way it is marked; None if it is not.

    In the last closed `<answer>`: the content of its last `\boxed{}`, or else all of it. Without such a tag: the
    content of the last `\boxed{}` of the text. An empty last box does not count. An empty tag gives the empty string if
    there is no box. Takes time linear in the length of `text`.
    """
    answer = last_answer(text)
    return (last_boxed(answer) if answer else last_boxed(text)) or answer


def ascii_digits(text: str) -> str:
    """Return the characters 0-9 of `text` in order, as one string.

    d1 keeps everything that `str.isdigit` accepts (superscripts, Arabic-Indic digits, ...). Those are never right and
    only shift the cells after them, so they are dropped here.
    """
    return _NOT_A_DIGIT.sub("", text)
