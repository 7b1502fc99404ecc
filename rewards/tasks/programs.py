"""Programs in completions: where they are, and what their tests make of them."""

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
from rewards.data.prompts import D1_FORMAT, demonstration, user_turn
from rewards.problem import Grade, Outcome, Problem, Split
from rewards.reading.answers import last_tagged
from rewards.reading.code_blocks import code_blocks
from rewards.sandbox import Sandbox, SandboxConfig, Suite, SuiteVerdict

LONGEST_PROGRAM = 100_000
"""Characters; a longer program is wrong."""

_CODE_SPAN = re.compile(r"\s*+(`{1,3})(?:python\s|py\s)?([^`]*)\1\s*")
_DEFINITION = re.compile(r"^(?:async +)?(?:def|class) +(\w+)", re.MULTILINE)
_DEFINES = re.compile(r"^[ \t]*(?:async +)?(?:def|class) +\w", re.MULTILINE)
_INSTRUCTION = "Inside the answer tags write the whole program in one ```python block, without tests or examples."
_FORMAT, _TESTS = 0.1, 0.9
_D1_FORMAT, _D1_TESTS = 0.5, 1.0


class ProgramsConfig(DataConfig):
    """What tasks have in common whose completions are programs."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where programs run, and what they may use."""

    @model_validator(mode="after")
    def _check_protocol(self) -> Self:
        if self.protocol == "d1":
            raise ValueError("the first d1 published no evaluation of programs; protocol should be fixed")
        return self

    @property
    def longest_grade_s(self) -> float:
        """A program and its tests may run so long."""
        return self.sandbox.longest_s


class ProgramTask(DataTask):
    """What tasks have in common whose completions are programs, graded by their tests."""

    def __init__(self, config: ProgramsConfig) -> None:
        """Take a task's config. The sandbox is tried when it is first needed: a list of tasks needs none."""
        super().__init__(config)
        self._config = config
        self._sandbox = cache(lambda: Sandbox(config.sandbox))

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """As `Dataset.problems`. Raises ValueError, too, where the sandbox does not work on this machine."""
        self._check()
        return super().problems(split, count, seed)

    def _check(self) -> None:
        """Raise ValueError, in one sentence, where the config's sandbox does not work on this machine."""
        self._sandbox()

    def grade_program(self, problem: Problem, text: str, program: str | None) -> Grade:
        """The grade of a program that stands in a text; None where there is none. Never raises.

        Parts of the fixed reward: `tests`, 0.9 times the fraction of tests that pass, and `format`, 0.1 for a closed
        answer tag with a block of Python in it. Those of d1, which its paper describes and its code lacks: the
        fraction, and 0.5 for the same format. Correct is what passes all tests.
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
            # No process could be started here: that says nothing about the program.
            return SuiteVerdict(passed=none, outcome=Outcome.ERROR, detail=f"the sandbox did not start: {error}"[:300])


def instruction(task: str) -> str:
    """A user's turn that asks for a program in d1's format."""
    return f"{D1_FORMAT}\n{_INSTRUCTION}\n\n{task}"


def label(program: str) -> str:
    """A right completion with this program."""
    return demonstration("d1", reasoning="", answer=f"```python\n{program.strip()}\n```")


def metadata_of(suite: Suite) -> dict[str, str]:
    """A suite as a problem carries it."""
    return {
        "tests": json.dumps(suite.tests),
        "setup": suite.setup,
        "entry_point": suite.entry_point or "",
        "below": "yes" if suite.below else "",
        "redefines": " ".join(suite.redefines),
        "plain_only": "yes" if suite.plain_only else "",
    }


def posed(problem_id: str, task: str, solution: str, suite: Suite) -> Problem:
    """The problem to write a program as `solution` is one: the tests see the builtins that it defines itself."""
    return Problem(
        problem_id=problem_id,
        messages=user_turn(instruction(task)),
        answer=solution,
        demonstration=label(solution),
        metadata=metadata_of(replace(suite, redefines=_redefined_in(solution))),
    )


def _redefined_in(code: str) -> tuple[str, ...]:
    """The builtins that a right program defines as functions or classes of its own."""
    return tuple(name for name in _DEFINITION.findall(code) if hasattr(builtins, name))


def suite_of(problem: Problem) -> Suite:
    """The suite that a problem carries."""
    given = problem.metadata
    return Suite(
        tests=tuple(json.loads(given["tests"])),
        setup=given["setup"],
        entry_point=given["entry_point"] or None,
        below=bool(given["below"]),
        redefines=tuple(given["redefines"].split()),
        plain_only=bool(given["plain_only"]),
    )


def program_in(text: str) -> str | None:
    """The program of a completion, moved to the margin where all of it is indented; None when there is none.

    It is the last block of Python in the last `<answer>` that closes, or else its last block without a language, or
    else all that stands there; without such a tag it is a block of the text. Where some blocks define a function or a
    class, the others are uses or output and do not count. A block that nothing closes ends with what it is in. Takes
    time linear in the text.
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
    """Whether a completion has an `<answer>` that closes, with a closed block of Python in it."""
    answer = last_tagged(text)
    blocks = code_blocks(answer or "")
    return any(block.is_closed and (block.is_python or not block.info) for block in blocks)
