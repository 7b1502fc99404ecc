"""MBPP: write a Python function from a one-sentence description (arXiv 2108.07732)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rewards.data.dataset import problem_id
from rewards.data.rows import Row, preview
from rewards.data.sources import HubSplit
from rewards.problem import Grade, Problem, Split
from rewards.sandbox import Suite
from rewards.tasks.code_task import CodeTask, ProgramsConfig, make_problem, program_in

# Three of its 374 training rows repeat a question of the test split and are left out.
_HUB = {
    Split.TRAIN: HubSplit(repo="google-research-datasets/mbpp", config="full", split="train", num_rows=371),
    Split.HELDOUT: HubSplit(repo="google-research-datasets/mbpp", config="full", split="test", num_rows=500),
}
_EXAMPLE = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b\n",
    "test_list": ["assert add(3, 4) == 7", "assert add(-1, 1) == 0"],
}


class MbppConfig(ProgramsConfig):
    """MBPP's tasks, in the splits of its hub config `full`."""

    name: Literal["mbpp"] = "mbpp"
    """Selects this task."""


class Mbpp(CodeTask):
    """MBPP: write a Python function from one sentence and one of its tests."""

    name = "mbpp"
    hub = _HUB
    example_row = _EXAMPLE

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade as `grade_program` does. Each statement of `test_list` and `challenge_test_list` is a test. Never
        raises."""
        return self.grade_program(problem, text, program_in(text))

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem of a description whose truth is a list of assertions, or an object with `test_list`.

        Raises ValueError for any other truth.
        """
        self._check()
        fields = truth if isinstance(truth, dict) else {"test_list": truth}
        return self._make_problem(Row(place="the ground truth", fields={"code": "pass", **fields, "text": question}))

    def _make_problem(self, row: Row) -> Problem:
        # The hub's config `sanitized` has this column name.
        text = row.text("prompt" if "text" not in row.fields and "prompt" in row.fields else "text")
        tests = (*_statements(row.fields, row, "test_list"), *_statements(row.fields, row, "challenge_test_list"))
        if not tests:
            raise ValueError(f"{row.place}: test_list is empty; it should be a list of assertions")
        setup = "\n".join([*_statements(row.fields, row, "test_imports"), str(row.fields.get("test_setup_code") or "")])
        # Papers show all tests, but then a lookup table of their values would pass.
        task = f"{text.strip()} It should pass this test:\n\n```python\n{tests[0]}\n```"
        suite = Suite(tests=tests, setup=setup, appended=True)
        return make_problem(problem_id(self.name, text, *tests), task, row.text("code"), suite)


def _statements(fields: Mapping[str, Any], row: Row, column: str) -> tuple[str, ...]:
    value = row.value(column) if column == "test_list" else fields.get(column) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{row.place}: {column} is {preview(value)}; it should be a list of statements")
    return tuple(value)
