"""Prompts, answer prefix and problem selection of the first d1's evaluation.

Copied verbatim from `eval/{eval,gsm8k,math500,countdown,sudoku}.py` of dllm-reasoning/d1 (Apache-2.0). Its denoising is
greedy in blocks of 32, in half as many steps as there are slots, whatever its arguments say.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewards.data.prompts import D1_MATHS, D1_SUDOKU
from rewards.problem import Problem

ANSWER_PREFIX = "<reasoning>"
"""Prefix of every answer, as a part of the prompt."""
LENGTHS = (128, 256, 512)
"""Completion lengths in its results table, in slots."""
BLOCK_LENGTH = 32
"""Slots of a denoising block."""

_NUM_PROBLEMS = 256
_SEED = 42
_FORMAT = """Respond in the following format:
<reasoning>
Your reasoning here
</reasoning>
<answer>
\\boxed{...}
</answer>"""
_COUNTDOWN = (
    "Using only the provided numbers, create an arithmetic expression that evaluates to exactly the provided target "
    "number. You may use the operations +, -, *, and / as needed, but each number must be used exactly once. Think "
    "step-by-step. After reasoning, provide only your final expression inside \\boxed{} tags without including an "
    "equals sign or the target number. For example: \\boxed{a + b * c}"
)
_SYSTEM = {
    "countdown": _COUNTDOWN + _FORMAT,
    # As published: the two differ in a space, and in a stray quotation mark followed by a space and a line break.
    "gsm8k": f"{D1_MATHS} \n{_FORMAT}",
    "math500": f'{D1_MATHS}\n{_FORMAT}" \n',
    "sudoku": D1_SUDOKU,
}
TASKS = tuple(_SYSTEM)
"""The tasks that it evaluates, by our names."""


def d1_prompt(task: str, problem: Problem) -> str:
    """Return the user's turn for a problem of one of `TASKS` in the compact style, without the answer prefix."""
    return f"{_SYSTEM[task]}\n\n{_question(task, problem)}"


def evaluated_problems(task: str, problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of a test file that it evaluates, in its order.

    These are 256 of Countdown and Sudoku, chosen by NumPy with seed 42, and all of the others.
    """
    if task not in ("countdown", "sudoku") or len(problems) < _NUM_PROBLEMS:
        return list(problems)
    import numpy as np

    # The legacy generator: NumPy guarantees that its stream never changes.
    places = np.random.RandomState(_SEED).choice(len(problems), _NUM_PROBLEMS, replace=False)
    return [problems[place] for place in places.tolist()]


def _question(task: str, problem: Problem) -> str:
    if task == "countdown":
        numbers = [int(number) for number in problem.metadata["numbers"].split()]
        return f"Numbers: {numbers}\nTarget: {problem.answer}"
    if task == "sudoku":
        return f"Solve the following Sudoku puzzle: {problem.metadata['puzzle']}\n"
    return problem.messages[-1].content
