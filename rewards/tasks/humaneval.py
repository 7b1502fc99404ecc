"""HumanEval: complete a Python function from its signature and docstring (arXiv 2107.03374)."""

from __future__ import annotations

import ast
import re
from textwrap import indent
from typing import Literal

from rewards.data.dataset import problem_id
from rewards.data.prompts import user_turn
from rewards.data.rows import Row, preview
from rewards.data.sources import HubSplit
from rewards.problem import Grade, Problem, Split
from rewards.sandbox import Suite
from rewards.tasks.code_task import CodeTask, ProgramsConfig, code_demonstration, instruction, metadata_of, program_in

_HUB = {Split.TRAIN: HubSplit(repo="openai/openai_humaneval", split="test")}
_EXAMPLE = {
    "prompt": 'def add(a: int, b: int) -> int:\n    """The sum of a and b.\n    >>> add(3, 4)\n    7\n    """\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(3, 4) == 7\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
_TRUTH = "an object with test and entry_point, as rows of HumanEval have them"


class HumanEvalConfig(ProgramsConfig):
    """HumanEval's 164 functions. The hub has them in one split; train and held-out are cut from it."""

    name: Literal["humaneval"] = "humaneval"
    """Selects this task."""


class HumanEval(CodeTask):
    """HumanEval: complete a Python function from its signature and docstring."""

    name = "humaneval"
    hub = _HUB
    example_row = _EXAMPLE

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade as `grade_program` does. A program is the whole function, or a continuation of the prompt. Never
        raises.

        A test is a statement of the dataset's `check` that asserts something about the function.
        """
        found = program_in(text)
        return self.grade_program(problem, text, None if found is None else _completed(problem, found))

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem whose question is a row's prompt, and whose truth has its `test` and `entry_point`.

        Raises ValueError for any other truth.
        """
        self._check()
        if not isinstance(truth, dict):
            raise ValueError(f"the ground truth is {preview(truth)}; a humaneval line has {_TRUTH}")
        return self._make_problem(
            Row(place="the ground truth", fields={"canonical_solution": "    pass", **truth, "prompt": question})
        )

    def _make_problem(self, row: Row) -> Problem:
        prompt, entry_point = row.text("prompt"), row.text("entry_point")
        solution = row.text("canonical_solution")
        suite = Suite(
            tests=_tests(row), setup=f"{prompt}\n{row.text('test')}", entry_point=entry_point, plain_only=True
        )
        task = (
            f"Complete this Python function. Repeat its imports and its signature.\n\n```python\n{prompt.rstrip()}\n```"
        )
        return Problem(
            problem_id=problem_id(self.name, prompt),
            messages=user_turn(instruction(task)),
            answer=solution,
            reference_completion=code_demonstration(f"{prompt}{solution}"),
            metadata={**metadata_of(suite), "prompt": prompt},
        )


def _tests(row: Row) -> tuple[str, ...]:
    """Return the statements of `check` that assert something about `candidate`, each with the statements before it."""
    try:
        statements = ast.parse(row.text("test")).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{row.place}: test is no Python: {error}") from error
    check = next((s for s in statements if isinstance(s, ast.FunctionDef) and s.name == "check"), None)
    if check is None:
        raise ValueError(f"{row.place}: test defines no function check(candidate)")
    tests, before = [], ""
    for statement in check.body:
        nodes = list(ast.walk(statement))
        before += ast.unparse(statement) + "\n"
        # Many contain `assert True, "..."`, which tests nothing.
        asserts = any(isinstance(node, ast.Assert) for node in nodes)
        if asserts and any(isinstance(node, ast.Name) and node.id == "candidate" for node in nodes):
            tests.append(before)
            before = ""
    if not tests:
        raise ValueError(f"{row.place}: check of test asserts nothing about its candidate")
    return tuple(tests)


def _completed(problem: Problem, found: str) -> str:
    """Return the prompt followed by the function, or by its body."""
    prompt, name = problem.metadata["prompt"], re.escape(problem.metadata["entry_point"])
    if re.search(rf"^(async +)?def +{name}\b", found, re.MULTILINE):
        return f"{prompt}\n{found}"
    body = found.lstrip("\n")
    return prompt + (body if body[:1] in (" ", "\t") else indent(body, "    "))
