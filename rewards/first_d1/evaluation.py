"""How the first d1's evaluation asks: its prompts, the tag that begins its answers, and which problems it takes.

`eval/{eval,gsm8k,math500,countdown,sudoku}.py` of dllm-reasoning/d1 (Apache-2.0), to the letter.
Its denoising is greedy in blocks of 32, in half as many steps as there are slots, whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewards.data.prompts import D1_MATHS, D1_SUDOKU
from rewards.problem import Problem

PREFIX = "<reasoning>"
"""What every answer begins with: it is a part of the prompt."""
LENGTHS = (128, 256, 512)
"""Slots of a completion that its table has."""
BLOCK_LENGTH = 32
"""Slots that are denoised together."""

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
    # The two differ in a space, and in a quotation mark with a space and a line break behind it.
    "gsm8k": f"{D1_MATHS} \n{_FORMAT}",
    "math500": f'{D1_MATHS}\n{_FORMAT}" \n',
    "sudoku": D1_SUDOKU,
}
TASKS = tuple(_SYSTEM)
"""The tasks that it evaluates, by our names."""


def asked(task: str, problem: Problem) -> str:
    """The user's turn of a problem of one of `TASKS`, posed in the compact style. The answer's prefix is not in it."""
    return f"{_SYSTEM[task]}\n\n{_question(task, problem)}"


def chosen(task: str, problems: Sequence[Problem]) -> list[Problem]:
    """Those of a test file that it asks, in its order: 256 of Countdown and Sudoku, as NumPy draws them after seed 42;
    all of the others."""
    if task not in ("countdown", "sudoku") or len(problems) < _NUM_PROBLEMS:
        return list(problems)
    import numpy as np

    # The legacy generator, whose stream NumPy promises never to change.
    places = np.random.RandomState(_SEED).choice(len(problems), _NUM_PROBLEMS, replace=False)
    return [problems[place] for place in places.tolist()]


def _question(task: str, problem: Problem) -> str:
    if task == "countdown":
        numbers = [int(number) for number in problem.metadata["numbers"].split()]
        return f"Numbers: {numbers}\nTarget: {problem.answer}"
    if task == "sudoku":
        return f"Solve the following Sudoku puzzle: {problem.metadata['puzzle']}\n"
    return problem.messages[-1].content
