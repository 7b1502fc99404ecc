"""Test suites of programming problems, and their verdicts."""

from __future__ import annotations

from dataclasses import dataclass

from rewards.problem import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Tests as Python code from the dataset, not the policy. They run where programs cannot access them."""

    tests: tuple[str, ...]
    """One or more statements each; a test passes if they raise nothing."""
    setup: str = ""
    """Code that runs before the tests, in the same namespace. There, `run_test` calls a pytest function with its
    fixtures."""
    entry_point: str | None = None
    """The function under test, called `candidate` in the tests. None: the program is the module `solution`."""
    appended: bool = False
    """Whether setup and tests see the program's names as if they were appended to it."""
    redefines: tuple[str, ...] = ()
    """Builtins that the program is supposed to define itself. For all others the tests use Python's own; otherwise a
    program that redefines them would decide the tests' comparisons."""
    plain_only: bool = False
    """Whether functions must return plain data and must not change their arguments. Then no object of the program's own
    classes takes part in a comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteVerdict:
    """Results of a test suite for one program."""

    passed: tuple[bool, ...]
    """Whether each test passed."""
    outcome: Outcome
    """`GRADED` if the tests decided, or the program exceeded its limits."""
    detail: str
    """The first failure, empty if there was none. May contain text from the program."""
