"""Base of the code tasks: extraction of programs from completions, and grading by unit tests."""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import replace
from functools import cache
from textwrap import dedent
from typing import Self

from pydantic import model_validator

from rewards.data.dataset import DataConfig, DataTask
from rewards.data.prompts import D1_FORMAT, format_completion, user_turn
from rewards.parsing.answers import last_tagged
from rewards.parsing.code_blocks import code_blocks
from rewards.problem import Grade, Outcome, Problem, Split
from rewards.sandbox import Sandbox, SandboxConfig, Suite, SuiteVerdict

LONGEST_PROGRAM = 100_000
"""Maximum characters of a program; a longer one is wrong."""

_CODE_SPAN = re.compile(r"\s*+(`{1,3})(?:python\s|py\s)?([^`]*)\1\s*")
_DEFINITION = re.compile(r"^(?:async +)?(?:def|class) +(\w+)", re.MULTILINE)
_DEFINES = re.compile(r"^[ \t]*(?:async +)?(?:def|class) +\w", re.MULTILINE)
_INSTRUCTION = "Inside the answer tags write the whole program in one ```python block, without tests or examples."
_FORMAT, _TESTS = 0.1, 0.9
_D1_FORMAT, _D1_TESTS = 0.5, 1.0


class ProgramsConfig(DataConfig):
    """Settings common to the code tasks."""

    sandbox: SandboxConfig = SandboxConfig()
    """The sandbox that runs programs, and its limits."""

    @model_validator(mode="after")
    def _check_protocol(self) -> Self:
        if self.protocol == "d1":
            raise ValueError("the first d1 published no evaluation of programs; protocol should be fixed")
        return self

    @property
    def max_grading_s(self) -> float:
        """The limit on a program with its tests."""
        return self.sandbox.max_s


class CodeTask(DataTask):
    """Base of the code tasks, graded by tests in a sandbox."""

    def __init__(self, config: ProgramsConfig) -> None:
        """Store the config. The sandbox is created on first use, since listing the tasks needs none."""
        super().__init__(config)
        self._config = config
        self._sandbox = cache(lambda: Sandbox(config.sandbox))

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return the same as `Dataset.problems`. Also raises ValueError if the sandbox does not work on this
        machine."""
        self._check()
        return super().problems(split, count, seed)

    def _check(self) -> None:
        """Raise ValueError if the configured sandbox does not work on this machine."""
        self._sandbox()

    def grade_program(self, problem: Problem, text: str, program: str | None) -> Grade:
        """Grade a program extracted from a text; None if there is none. Never raises.

        Parts of the fixed reward: `tests`, 0.9 times the fraction of tests that pass, and `format`, 0.1 for a closed
        answer tag that contains a Python block. d1's parts, described in its paper but absent from its code: the
        fraction, and 0.5 for the same format. A program is correct if it passes all tests.
        """
        is_d1 = self._config.reward == "d1"
        form = (_D1_FORMAT if is_d1 else _FORMAT) * has_format(text)
        if program is None:
            return Grade(reward=form, parts={"tests": 0.0, "format": form}, correct=False, detail="there is no program")
        verdict = self._verdict(program, suite_of(problem))
        fraction = sum(verdict.passed) / max(len(verdict.passed), 1)
        tests = (_D1_TESTS if is_d1 else _TESTS) * fraction
        return Grade(
            reward=tests + form,
            parts={"tests": tests, "format": form},
            correct=bool(verdict.passed) and all(verdict.passed),
            outcome=verdict.outcome,
            answer=program,
            detail=verdict.detail,
        )

    def _verdict(self, program: str, suite: Suite) -> SuiteVerdict:
        none = (False,) * len(suite.tests)
        if len(program) > LONGEST_PROGRAM:
            why = f"the program has {len(program)} characters, more than {LONGEST_PROGRAM}"
            return SuiteVerdict(passed=none, outcome=Outcome.GRADED, detail=why)
        try:
            return self._sandbox().judge(program, suite)
        except (OSError, ValueError) as error:
            # No process could be started, which says nothing about the program.
            return SuiteVerdict(passed=none, outcome=Outcome.ERROR, detail=f"the sandbox did not start: {error}"[:300])


def instruction(task: str) -> str:
    """Return a user turn that asks for a program in d1's format."""
    return f"{D1_FORMAT}\n{_INSTRUCTION}\n\n{task}"


def code_demonstration(program: str) -> str:
    """Return a demonstration that contains this program."""
    return format_completion("d1", reasoning="", answer=f"```python\n{program.strip()}\n```")


def metadata_of(suite: Suite) -> dict[str, str]:
    """Return a suite as problem metadata."""
    return {
        "tests": json.dumps(suite.tests),
        "setup": suite.setup,
        "entry_point": suite.entry_point or "",
        "below": "yes" if suite.appended else "",
        "redefines": " ".join(suite.redefines),
        "plain_only": "yes" if suite.plain_only else "",
    }


def make_problem(problem_id: str, task: str, solution: str, suite: Suite) -> Problem:
    """Return a problem whose reference is `solution`. The tests see the builtins that `solution` redefines."""
    return Problem(
        problem_id=problem_id,
        messages=user_turn(instruction(task)),
        answer=solution,
        reference_completion=code_demonstration(solution),
        metadata=metadata_of(replace(suite, redefines=_redefined_in(solution))),
    )


def _redefined_in(code: str) -> tuple[str, ...]:
    """Return the builtins that a reference program redefines as functions or classes."""
    return tuple(name for name in _DEFINITION.findall(code) if hasattr(builtins, name))


def suite_of(problem: Problem) -> Suite:
    """Return the suite in a problem's metadata."""
    given = problem.metadata
    return Suite(
        tests=tuple(json.loads(given["tests"])),
        setup=given["setup"],
        entry_point=given["entry_point"] or None,
        appended=bool(given["below"]),
        redefines=tuple(given["redefines"].split()),
        plain_only=bool(given["plain_only"]),
    )


def program_in(text: str) -> str | None:
    """Extract the program of a completion, dedented if all of it is indented; None if there is none.

    From the last closed `<answer>`: its last Python block, or else its last block without a language, or else its whole
    content. Without such a tag: a block of the text, by the same preference. Blocks that define a function or class
    take precedence over the others, which are usage or output. An unclosed block ends with the text or tag that it is
    in. Takes time linear in the text.
    """
    code = _code_in(text)
    if code is None or not code.lstrip("\n")[:1].isspace():
        return code
    return dedent(code)


def _code_in(text: str) -> str | None:
    answer = last_tagged(text)
    blocks = [block for block in code_blocks(text if answer is None else answer) if block.code.strip()]
    of_python = [block for block in blocks if block.is_python] or [block for block in blocks if not block.info]
    if of_python:
        return next((block.code for block in reversed(of_python) if _DEFINES.search(block.code)), of_python[-1].code)
    if answer is None or not answer.strip():
        return None
    span = _CODE_SPAN.fullmatch(answer)
    return span[2] if span else answer


def has_format(text: str) -> bool:
    """Return whether a completion has a closed `<answer>` that contains a closed Python block."""
    answer = last_tagged(text)
    blocks = code_blocks(answer or "")
    return any(block.is_closed and (block.is_python or not block.info) for block in blocks)
