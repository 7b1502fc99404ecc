"""Tests of the code tasks, whose completions are programs."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rewards import Outcome, Problem, Split, make_task
from rewards.sandbox import Sandbox, SandboxConfig
from rewards.tasks.code_task import LONGEST_PROGRAM, has_format, program_in
from rewards.tasks.humaneval import HumanEval, HumanEvalConfig
from rewards.tasks.kodcode import Kodcode, KodcodeConfig
from rewards.tasks.mbpp import Mbpp, MbppConfig

_HUMANEVAL = Path(__file__).parents[3].parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
_TASKS = [HumanEval(HumanEvalConfig()), Kodcode(KodcodeConfig()), Mbpp(MbppConfig())]
_D1 = [HumanEval(HumanEvalConfig(reward="d1")), Kodcode(KodcodeConfig(reward="d1")), Mbpp(MbppConfig(reward="d1"))]

_MBPP = {
    "task_id": 1,
    "text": "Write a function to find the longest chain of pairs.",
    "code": (
        "class Pair(object):\n    def __init__(self, a, b):\n        self.a = a\n        self.b = b\n"
        "def longest(pairs, n):\n    best = [1] * n\n    for i in range(1, n):\n        for j in range(i):\n"
        "            if pairs[i].a > pairs[j].b and best[i] < best[j] + 1:\n                best[i] = best[j] + 1\n"
        "    return max(best)\n"
    ),
    "test_list": [
        "assert longest([Pair(5, 24), Pair(15, 25), Pair(27, 40), Pair(50, 60)], 4) == 3",
        "assert longest([Pair(1, 2), Pair(3, 4)], 2) == 2",
    ],
    "test_setup_code": "",
    "challenge_test_list": ["assert longest([Pair(1, 9)], 1) == 1"],
}
_TREE = {
    "text": "Write a function to find the depth of a tree.",
    "code": (
        "class Node:\n    def __init__(self, data):\n        self.data = data\n        self.left = self.right = None\n"
        "def depth(node):\n    return 0 if node is None else 1 + max(depth(node.left), depth(node.right))\n"
    ),
    "test_list": ["assert depth(root) == 2", "assert depth(None) == 0"],
    "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
}
_KODCODE = {
    "question": "Keep numbers in order.",
    "solution": (
        "import bisect\n\nclass Ordered:\n    def __init__(self):\n        self.items = []\n"
        "    def add(self, n):\n        if n < 0:\n            raise ValueError('negative')\n"
        "        bisect.insort(self.items, n)\n"
    ),
    "test": (
        "from solution import Ordered\nimport pytest\n\ndef test_order():\n    o = Ordered()\n    for n in (3, 1, 2):\n"
        "        o.add(n)\n    assert o.items == [1, 2, 3]\n\n"
        "def test_negative():\n    with pytest.raises(ValueError):\n        Ordered().add(-1)\n\n"
        "class TestMore:\n    def test_empty(self):\n        assert Ordered().items == []\n"
    ),
}


def _write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _one(make: Callable[..., Any], path: Path, row: dict[str, Any]) -> tuple[Any, Problem]:
    other = {**row, **{key: f"{row[key]} (Another.)" for key in ("text", "question") if key in row}}
    if "prompt" in row:
        other = {**row, "prompt": row["prompt"].replace('"""', '""" Another.', 1)}
    files = {"train_data": _write(path / "a.jsonl", row), "heldout_data": _write(path / "b.jsonl", other)}
    task = make_task(make(**files))
    return task, task.problems(Split.TRAIN, 1, seed=0)[0]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("<answer>\n```python\nx = 1\n```\n</answer>", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```python\nx = 2\n```\nso", "x = 2\n"),
        ("```python\nx = 1\n```\n<answer>\n```py\nx = 2\n```\n</answer>\n```python\nx = 3\n```", "x = 2\n"),
        ("<answer>```python\nx = 1\n```</answer><answer>\n```\nx = 2\n```\n</answer>", "x = 2\n"),
        ("```python\nx = 1\n```\n```text\nno\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
        ("1. So:\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("<answer>`x = 1`</answer>", "x = 1"),
        ("<answer>```python x = 1```</answer>", "x = 1"),
        ("<answer>\n    return 1\n</answer>", "\nreturn 1\n"),
        ("<answer>\n```python\n    def f():\n        pass\n```\n</answer>", "def f():\n    pass\n"),
        ("```python\ndef f(): pass\n```\nUse:\n```python\nf()\n```", "def f(): pass\n"),
        ("```\nclass A: pass\n```\nOutput:\n```\n7\n```", "class A: pass\n"),
        ("```python\ndef f(): pass\n```\nOr:\n```python\ndef g(): pass\n```", "def g(): pass\n"),
        ("```python\nx = 1", "x = 1"),
        ("<answer>```python\nx = 1</answer>", "x = 1"),
        ("<answer>\n```python\nx = 1", "x = 1"),
        ("<answer> </answer>", None),
        ("```python\n```", None),
        ("no program", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_block_of_the_last_answer(text: str, program: str | None) -> None:
    assert program_in(text) == program


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("<answer>\n```python\nx = 1\n```\n</answer>", True),
        ("<answer>\nx = 1\n</answer>", False),
        ("<answer>\n```python\nx = 1\n</answer>", False),
        ("```python\nx = 1\n```", False),
        ("<answer>\n1. So:\n   ```py\n   x = 1\n   ```\n</answer>", True),
        ("<answer>\n```text\nx = 1\n```\n</answer>", False),
    ],
)
def test_the_format_is_a_closed_block_in_a_closed_answer(text: str, has: bool) -> None:
    assert has_format(text) is has


@pytest.mark.parametrize("task", _TASKS, ids=lambda task: task.name)
def test_the_example_earns_the_full_reward_and_a_wrong_one_does_not(task: Any) -> None:
    problem = task.example()
    right = task.grade(problem, problem.reference_completion)
    assert (right.reward, right.correct, right.parts) == (1.0, True, {"tests": 0.9, "format": 0.1})
    half = task.grade(problem, "<answer>\n```python\ndef add(a, b):\n    return 7\n```\n</answer>")
    assert (half.correct, half.outcome, half.parts) == (False, Outcome.GRADED, {"tests": 0.45, "format": 0.1})
    bare = task.grade(problem, "```python\ndef add(a, b):\n    return a + b\n```")
    assert (bare.reward, bare.correct) == (0.9, True)
    none = task.grade(problem, "I do not know.")
    assert (none.reward, none.correct, none.answer) == (0.0, False, None)
    assert none.detail == "there is no program"


@pytest.mark.parametrize("task", _D1, ids=lambda task: task.name)
def test_the_first_d1s_reward_adds_half_for_the_format(task: Any) -> None:
    problem = task.example()
    assert task.grade(problem, problem.reference_completion).parts == {"tests": 1.0, "format": 0.5}
    assert task.grade(problem, "```python\ndef add(a, b):\n    return a + b\n```").reward == 1.0


@pytest.mark.parametrize("config", [HumanEvalConfig, KodcodeConfig, MbppConfig])
def test_the_first_d1s_protocol_is_not_available(config: type) -> None:
    with pytest.raises(ValidationError, match="the first d1 published no evaluation of programs; protocol should be"):
        config(protocol="d1")


def test_hostile_texts_are_graded_in_bounded_time() -> None:
    task = HumanEval(HumanEvalConfig(sandbox=SandboxConfig(cpu_s=1, wall_s=60)))
    problem = task.example()
    for text in (
        "```python\n" * 200_000,
        "<answer>" * 100_000,
        "<answer>" + "`" * 90_000 + "</answer>",
        "<answer>" + "x" * (LONGEST_PROGRAM + 1) + "</answer>",
    ):
        grade = task.grade(problem, text)
        assert (grade.correct, grade.outcome) == (False, Outcome.GRADED)
    for program in ("-" * 90_000 + "1", "(" * 90_000, "[" * 500 + "]" * 500, "\ud800", "\x00", "x = 10 ** 10 ** 10"):
        grade = task.grade(problem, f"<answer>\n```python\n{program}\n```\n</answer>")
        assert (grade.correct, grade.outcome) == (False, Outcome.GRADED)


def test_humaneval_accepts_a_function_its_body_or_a_continuation() -> None:
    task = _TASKS[0]
    problem = task.example()
    for program in (
        "def add(a, b):\n    return a + b",
        "import math\n\nasync_ = 1\ndef add(a: int, b: int) -> int:\n    return math.fsum([a, b])",
        "    return a + b",
        "return a + b",
        "    return helper(a, b)\n\ndef helper(a, b):\n    return a + b",
        "if a:\n    return a + b\nreturn b",
    ):
        assert task.grade(problem, f"<answer>\n```python\n{program}\n```\n</answer>").correct, program
    assert task.grade(problem, "<answer>return a + b</answer>").correct


def test_a_failing_sandbox_is_an_error_and_not_reward_0(monkeypatch: pytest.MonkeyPatch) -> None:
    task = HumanEval(HumanEvalConfig())
    problem = task.example()
    assert task.grade(problem, problem.reference_completion).correct

    def fail(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(Sandbox, "judge", fail)
    grade = task.grade(problem, problem.reference_completion)
    assert (grade.outcome, grade.correct) == (Outcome.ERROR, False)
    assert "no more processes" in grade.detail


def test_a_missing_sandbox_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("there is no sandbox")

    monkeypatch.setattr(Sandbox, "__init__", refuse)
    for make in (HumanEvalConfig, KodcodeConfig, MbppConfig):
        task = make_task(make(train_data=Path("/nowhere.jsonl")))
        assert task.example()
        for ask in (lambda t: t.problems(Split.TRAIN, 1, seed=0), lambda t: t.from_ground_truth("", {})):
            with pytest.raises(ValueError, match="there is no sandbox"):
                ask(task)


def test_setup_lines_stay_before_the_next_test() -> None:
    check = (
        "def check(candidate):\n    expected = 2\n    assert expected > 0\n    assert candidate(1) == expected\n"
        "    assert candidate(2) == 3\n"
    )
    problem = _TASKS[0].from_ground_truth('def f(x):\n    """More."""\n', {"test": check, "entry_point": "f"})
    assert _TASKS[0].grade(problem, "```python\ndef f(x): return x + 1\n```").correct


@pytest.mark.parametrize(
    "text",
    [
        "1. This adds:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
        '```python\ndef add(a, b):\n    """Add.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n```',
        "```python\ndef add(a, b):\n    return a + b\n```\n\nIt prints:\n\n```\n7\n```\n",
        "> ~~~~ Python title=add\r\n> def add(a, b):\r\n>     return a + b\r\n> ~~~~\r\n",
    ],
)
def test_a_program_runs_wherever_its_block_is(text: str) -> None:
    for task in _TASKS:
        for said in (text, f"<answer>\n{text}\n</answer>"):
            assert task.grade(task.example(), said).correct, (task.name, said)


def test_mbpp_has_classes_setups_and_challenges(tmp_path: Path) -> None:
    for name, row in (("pairs", _MBPP), ("tree", _TREE)):
        (tmp_path / name).mkdir()
        task, problem = _one(MbppConfig, tmp_path / name, row)
        grade = task.grade(problem, problem.reference_completion)
        assert (grade.reward, grade.correct, grade.detail) == (1.0, True, "")
        assert row["test_list"][0] in problem.messages[0].content
        assert row["test_list"][1] not in problem.messages[0].content
        wrong = problem.reference_completion.replace("max(", "min(")
        assert not task.grade(problem, wrong).correct


def test_builtins_may_be_redefined_where_the_reference_does(tmp_path: Path) -> None:
    row = {"text": "Sum.", "code": "def sum(a, b):\n    return a + b", "test_list": ["assert sum(10, 15) == 25"]}
    task, problem = _one(MbppConfig, tmp_path, row)
    assert task.grade(problem, problem.reference_completion).correct
    assert not task.grade(problem, problem.reference_completion.replace("+", "-")).correct


def test_mbpp_may_repeat_a_question_with_other_tests(tmp_path: Path) -> None:
    row = {"text": "Double.", "code": "def twice(x):\n    return 2 * x", "test_list": ["assert twice(1) == 2"]}
    other = {**row, "test_list": [*row["test_list"], "assert twice(2) == 4"]}
    path = _write(tmp_path / "all.jsonl", row, other)
    task = Mbpp(MbppConfig(train_data=path))
    assert sorted((task.max_size(Split.TRAIN), task.max_size(Split.HELDOUT))) == [0, 2]


def test_mbpp_sanitized_is_read(tmp_path: Path) -> None:
    row = {
        "prompt": "Write a function to halve.",
        "code": "def half(x):\n    return x / 2",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(half(3), 1.5)"],
    }
    task, problem = _one(MbppConfig, tmp_path, row)
    assert task.grade(problem, problem.reference_completion).correct


def test_kodcode_counts_test_functions(tmp_path: Path) -> None:
    task, problem = _one(KodcodeConfig, tmp_path, _KODCODE)
    assert task.grade(problem, problem.reference_completion).reward == 1.0
    grade = task.grade(problem, problem.reference_completion.replace("n < 0", "False"))
    assert grade.parts["tests"] == pytest.approx(0.6)
    assert grade.detail == "run_test(test_negative): FailedError: <class 'ValueError'> was not raised"
    assert "It should define: Ordered" in problem.messages[0].content


def test_kodcode_ignores_fixtures_and_methods_of_other_classes() -> None:
    truth = (
        "import pytest\nfrom solution import one\n"
        "@pytest.fixture\ndef test_data(): return 1\n"
        "class TestOne:\n    def test_one(self, test_data): assert one() == test_data\n"
        "class Helper:\n    def test_help(self): return 1\n"
    )
    problem = _TASKS[1].from_ground_truth("One.", truth)
    assert json.loads(problem.metadata["tests"]) == ["run_test(TestOne().test_one)"]
    assert _TASKS[1].grade(problem, "```python\ndef one():\n    return 1\n```").correct


@pytest.mark.parametrize(
    ("task", "question", "truth"),
    [
        (
            _TASKS[0],
            'def one():\n    """One."""\n',
            {"test": "def check(candidate):\n    assert candidate() == 1", "entry_point": "one"},
        ),
        (_TASKS[1], "One.", "from solution import one\ndef test_one():\n    assert one() == 1"),
        (_TASKS[2], "One.", ["assert one() == 1"]),
    ],
)
def test_published_generations_are_graded(task: Any, question: str, truth: object) -> None:
    problem = task.from_ground_truth(question, truth)
    assert task.grade(problem, "```python\ndef one():\n    return 1\n```").correct
    assert not task.grade(problem, "```python\ndef one():\n    return 2\n```").correct


@pytest.mark.parametrize(
    ("task", "truth", "sentence"),
    [
        (_TASKS[0], "x", "the ground truth is .*; a humaneval line has an object with test and entry_point"),
        (_TASKS[0], {"test": "x"}, "the ground truth has no column entry_point"),
        (_TASKS[0], {"test": "def f(", "entry_point": "f"}, "test is no Python"),
        (_TASKS[0], {"test": "x = 1", "entry_point": "f"}, r"test defines no function check\(candidate\)"),
        (_TASKS[0], {"test": "def check(candidate):\n    assert True", "entry_point": "f"}, "asserts nothing"),
        (_TASKS[1], "x = 1", "it should define functions test_"),
        (_TASKS[1], {"tests": ""}, "the ground truth has no column test"),
        (_TASKS[2], "assert f()", "test_list is .*; it should be a list of statements"),
        (_TASKS[2], [], "test_list is empty"),
    ],
)
def test_an_invalid_ground_truth_is_refused_in_one_sentence(task: Any, truth: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        task.from_ground_truth("Do it.", truth)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("config", "row"), [(MbppConfig, _MBPP), (KodcodeConfig, _KODCODE)])
def test_a_missing_column_is_named_with_its_row(tmp_path: Path, config: type, row: dict[str, Any]) -> None:
    for column in {"text", "code", "test_list"} if config is MbppConfig else set(row):
        path = _write(tmp_path / f"{column}.jsonl", {key: value for key, value in row.items() if key != column})
        task = make_task(config(train_data=path, heldout_data=path))
        with pytest.raises(ValueError, match=rf"line 1 has no column {column}; its columns are"):
            task.problems(Split.TRAIN, 1, seed=0)


def _humaneval() -> tuple[Any, list[Problem]]:
    task = HumanEval(HumanEvalConfig(train_data=_HUMANEVAL, sandbox=SandboxConfig(wall_s=120)))
    return task, [p for split in (Split.TRAIN, Split.HELDOUT) for p in task.problems(split, task.size(split), seed=0)]


def _graded(task: Any, pairs: list[tuple[Problem, str]]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: task.grade(*pair), pairs))


@pytest.mark.skipif(not _HUMANEVAL.is_file(), reason="needs shared/data beside the repository")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_reference_solutions_of_humaneval_pass_and_mutated_ones_fail(every: int) -> None:
    task, problems = _humaneval()
    assert len(problems) == 164
    problems = problems[::every]
    right = _graded(task, [(problem, problem.reference_completion) for problem in problems])
    assert [p.metadata["entry_point"] for p, g in zip(problems, right, strict=True) if g.reward != 1.0] == []

    def mutant(problem: Problem) -> str:
        return f"<answer>\n```python\n{problem.metadata['prompt']}    return None\n```\n</answer>"

    wrong = _graded(task, [(problem, mutant(problem)) for problem in problems])
    assert [p.metadata["entry_point"] for p, g in zip(problems, wrong, strict=True) if g.correct] == []


@pytest.mark.skipif(not _HUMANEVAL.is_file(), reason="needs shared/data beside the repository")
def test_reference_solutions_of_humaneval_that_are_off_by_one_fail() -> None:
    """For every seventh problem, the last integer constant of the body is increased by one."""
    task, problems = _humaneval()
    pairs = []
    for problem in problems[::7]:
        body = problem.answer
        found = list(re.finditer(r"(?<![\w.'\"])\d+(?![\w.'\"])", body))
        if found:
            last = found[-1]
            changed = body[: last.start()] + str(int(last[0]) + 1) + body[last.end() :]
            pairs.append((problem, f"```python\n{problem.metadata['prompt']}{changed}\n```"))
    assert len(pairs) >= 10
    grades = _graded(task, pairs)
    # A few constants have no effect, such as an initial value that is overwritten.
    assert sum(grade.correct for grade in grades) <= len(pairs) // 5
    assert all(grade.outcome is Outcome.GRADED for grade in grades)


@pytest.mark.skipif(not _HUMANEVAL.is_file(), reason="needs shared/data beside the repository")
def test_trivially_true_asserts_of_humaneval_are_not_counted() -> None:
    _, problems = _humaneval()
    assert not any("assert True" in json.loads(problem.metadata["tests"])[-1].splitlines()[-1] for problem in problems)
    with gzip.open(_HUMANEVAL, "rt") as file:
        assert sum("assert True" in line for line in file) > 30
