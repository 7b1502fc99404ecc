"""Prompt styles, d1's prompt texts, and the formats of demonstrations."""

from __future__ import annotations

from typing import Literal

from rewards.problem import Message

PromptStyle = Literal["d1", "compact"]
"""`d1`: the wording of d1's code, for instruction-tuned models. `compact`: bare symbols, for tiny models trained from
scratch."""

# The wording of d1 (Apache-2.0, `diffu-grpo/data_utils.py`), verbatim: published checkpoints were trained on it. It
# begins with a line break, which LLaDA's chat template strips.
D1_FORMAT = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""
# Its wording for maths (`get_math_questions`, and `eval/gsm8k.py`, `eval/math500.py`).
D1_MATHS = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{}."
)
# Its wording for Sudoku (the same file, `SUDOKU_SYSTEM_PROMPT`, and `eval/sudoku.py`).
D1_SUDOKU = """
Please solve the following 4x4 Sudoku puzzle. The puzzle is provided as a 16-character string reading left-to-right, \
top-to-bottom, where '0' represents empty cells.

Rules:
- Fill empty cells with digits 1-4
- Each row must contain digits 1-4 exactly once
- Each column must contain digits 1-4 exactly once
- Each 2x2 box must contain digits 1-4 exactly once

Important: Your solution must be a COMPLETE 16-character string with only the digits 1-4, \
representing your final solved grid.

Respond in this exact format:
<reasoning>
Your step-by-step solving process
</reasoning>
<answer>
[16-character solution string with no spaces or separators]
</answer>
"""


def user_turn(content: str) -> tuple[Message, ...]:
    """Return a conversation of one user turn. d1 has no system role: its instructions are at the start of this turn."""
    return (Message(role="user", content=content),)


def format_completion(style: PromptStyle, *, reasoning: str, answer: str) -> str:
    """Return a correct completion in the format that the prompt requests. The compact format has no reasoning."""
    if style == "compact":
        return f"<answer>{answer}</answer>"
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"
