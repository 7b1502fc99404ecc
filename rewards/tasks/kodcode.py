"""KodCode: write Python functions and classes that pass pytest tests (arXiv 2503.02951)."""

from __future__ import annotations

import re
from typing import Literal

from rewards.data.dataset import problem_id
from rewards.data.rows import Row, preview
from rewards.data.sources import HubSplit
from rewards.problem import Grade, Problem, Split
from rewards.sandbox import Suite
from rewards.tasks.code_task import CodeTask, ProgramsConfig, make_problem, program_in

# The first d1's training set (its paper, section 4).
_HUB = {Split.TRAIN: HubSplit(repo="KodCode/KodCode-Light-RL-10K", split="train")}
# The first alternative skips fixtures, which are not tests whatever their names.
_TEST = re.compile(
    r"^ *@(?:pytest\.)?fixture\b.*\n(?: *@.*\n)* *def +\w+|^(?:class +(\w+)|( *)def +(test\w*))", re.MULTILINE
)
_IMPORT = re.compile(r"^from +solution +import +(.+)$", re.MULTILINE)
_EXAMPLE = {
    "question": "Write a function that adds two numbers.",
    "solution": "def add(a, b):\n    return a + b\n",
    "test": (
        "from solution import add\n\ndef test_add():\n    assert add(3, 4) == 7\n\n"
        "def test_zero():\n    assert add(0, 0) == 0\n"
    ),
    "test_info": [{"function_declaration": "def add(a, b):"}],
}


class KodcodeConfig(ProgramsConfig):
    """KodCode's light RL set. The hub has it in one split; train and held-out are cut from it."""

    name: Literal["kodcode"] = "kodcode"
    """Selects this task."""


class Kodcode(CodeTask):
    """KodCode: write a Python program that passes pytest tests."""

    name = "kodcode"
    hub = _HUB
    example_row = _EXAMPLE

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade as `grade_program` does. Each test function or method is a test; the program is the module `solution`.

        Supported from pytest: `raises`, `approx`, `fail`, `fixture`, `mark.parametrize` and `setup_method`. Tests that
        need more give an error, not a zero. Never raises.
        """
        return self.grade_program(problem, text, program_in(text))

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem of a question whose truth is its tests: a text, or an object with `test`. Raises
        ValueError."""
        self._check()
        fields = truth if isinstance(truth, dict) else {"test": truth}
        return self._make_problem(
            Row(place="the ground truth", fields={"solution": "pass", **fields, "question": question})
        )

    def _make_problem(self, row: Row) -> Problem:
        text, test = row.text("question"), row.text("test")
        tests = _tests(test)
        if not tests:
            raise ValueError(f"{row.place}: test is {preview(test)}; it should define functions test_...")
        task = f"{text.strip()}\n\n{_interface(row, test)}".strip()
        return make_problem(problem_id(self.name, text), task, row.text("solution"), Suite(tests=tests, setup=test))


def _tests(source: str) -> tuple[str, ...]:
    """Return a call of each test function, and of each test method on a new instance of its class."""
    tests, owner = [], ""
    for found in _TEST.finditer(source):
        if found[1]:
            owner = found[1] if found[1].startswith("Test") else ""
        elif not found[3]:
            continue
        elif not found[2]:
            tests.append(f"run_test({found[3]})")
        elif owner:
            tests.append(f"run_test({owner}().{found[3]})")
    return tuple(tests)


def _interface(row: Row, test: str) -> str:
    """Return what the tests import: its declaration if the row has one, or else its name."""
    match row.fields.get("test_info"):
        case [{"function_declaration": str(declaration)}, *_]:
            return f"It should begin so:\n\n```python\n{declaration.strip()}\n```"
    names = ", ".join(found[1].strip() for found in _IMPORT.finditer(test))
    return f"It should define: {names}" if names else ""
