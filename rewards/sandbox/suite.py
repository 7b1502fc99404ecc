"""The tests of a problem, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass

from rewards.problem import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Tests, as Python that the dataset wrote and not the policy. They run where no program gets at them."""

    tests: tuple[str, ...]
    """One or more statements each; a test passes if they raise nothing."""
    setup: str = ""
    """Runs before them, in the same namespace. `run_test` there calls a pytest function with its fixtures."""
    entry_point: str | None = None
    """The function under test, `candidate` there. None: the module `solution` is the program."""
    below: bool = False
    """Whether setup and tests see the program's names as if they stood below it."""
    redefines: tuple[str, ...] = ()
    """Builtins that the program should define itself. Of all others the tests have Python's own, whatever the program
    calls by their names: it would decide their comparisons."""
    plain_only: bool = False
    """Whether functions must return plain data and change nothing that they are given: then no object of the program's
    own class has a say in any comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteVerdict:
    """What tests say of a program."""

    passed: tuple[bool, ...]
    """For each test whether it passed."""
    outcome: Outcome
    """`GRADED` if the tests decided, or the program used up what it may."""
    detail: str
    """The first thing that went wrong, empty if nothing did. Parts of it are the program's words."""
