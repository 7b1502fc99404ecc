"""The two ways of putting a problem to the policy and of writing down its solution."""

from __future__ import annotations

from typing import Literal

from rewards.problem import Message

PromptStyle = Literal["d1", "compact"]
"""`d1`: the words of d1's code, for instruction-tuned models. `compact`: bare symbols, for tiny models from scratch."""

# The wording of d1 (Apache-2.0, `diffu-grpo/data_utils.py`), to the letter: published checkpoints were trained on it.
# It has a line break at its head, which LLaDA's chat template strips.
D1_FORMAT = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""
# Its wording of maths (`get_math_questions`, and `eval/gsm8k.py`, `eval/math500.py`).
D1_MATHS = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{}."
)
# Its wording of Sudoku (the same, `SUDOKU_SYSTEM_PROMPT`, and `eval/sudoku.py`).
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
    """A conversation of one user turn. d1 has no system role: its instructions are the head of this turn."""
    return (Message(role="user", content=content),)


def demonstration(style: PromptStyle, *, reasoning: str, answer: str) -> str:
    """A right completion in the format that the prompt asks for; the compact format has no reasoning."""
    if style == "compact":
        return f"<answer>{answer}</answer>"
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"
