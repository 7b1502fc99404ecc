"""Where a completion says what its answer is."""

from __future__ import annotations

import re

from rewards.reading.boxed import last_boxed

_OPEN, _CLOSE = "<answer>", "</answer>"
_NOT_A_DIGIT = re.compile(r"[^0-9]+")


def last_answer(text: str) -> str | None:
    """The stripped text of the last `<answer>...</answer>` of a completion; None when no pair of tags closes.

    As in d1's countdown and sudoku rewards (`diffu-grpo/reward_func.py`, `extract_solution`): pairs are matched from
    left to right, an answer that is never closed is no answer, and an `<answer>` inside an open answer is part of its
    text. An empty pair is an answer: the empty string. Takes time linear in the length of `text`.
    """
    answer = last_tagged(text)
    return None if answer is None else answer.strip()


def last_tagged(text: str) -> str | None:
    """As `last_answer`, with the white space around it."""
    # Not d1's regular expression: on a text of many `<answer>` and no `</answer>` it takes quadratic time.
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
    r"""What a completion says its answer is, however it marks it; None when it does not.

    The last `<answer>` that closes: what a `\boxed{}` in it holds, or else all of it. Without such a tag, what the last
    `\boxed{}` of the text holds. A last box that is empty is none; an empty tag is the empty answer where there is no
    box. Takes time linear in the length of `text`.
    """
    answer = last_answer(text)
    return (last_boxed(answer) if answer else last_boxed(text)) or answer


def ascii_digits(text: str) -> str:
    """The characters 0-9 of `text` in order, as one string.

    d1 keeps all that `str.isdigit` accepts (superscripts, Arabic-Indic digits, ...). Those are never right and only
    shift the cells after them: we drop them.
    """
    return _NOT_A_DIGIT.sub("", text)
