"""Tests of the maths verifier, which compares answers in a killable worker process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards import Outcome
from rewards.maths import Limits, MathVerifier, normalized_latex, process, same_spelling, verifier

_ROOT = Path(__file__).parents[2]
_DATA = _ROOT.parent / "shared" / "data" / "llada-generations" / "math500_256.jsonl"
# Allowance for delays by other processes on this machine.
_SLACK_S = 6.0
_WALL_S = 20.0
# Equal but spelled differently, so that only the worker can tell.
_HALF = ("\\frac12", "0.5")
_ENDLESS = r"\sum_{k=1}^{10^9} \sin(k^2)"


@pytest.fixture(scope="module")
def maths() -> Iterator[MathVerifier]:
    maths = MathVerifier()
    yield maths
    maths.close()


@pytest.fixture(scope="module")
def strict() -> Iterator[MathVerifier]:
    """A verifier with little CPU time and practically no length limit, so that every answer is parsed."""
    maths = MathVerifier(Limits(cpu_s=0.4, timeout_s=_WALL_S, max_chars=10_000_000, memory_bytes=400 << 20))
    assert maths.verify(*_HALF).right
    yield maths
    maths.close()


def _descendants(pid: int | None = None) -> list[int]:
    """Find the zygotes below a process and their workers, zombies included.

    It uses each process's parent id: lists of children briefly omit those of an ending thread.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found, below = [], [pid or os.getpid()]
    while below:
        new = children.get(below.pop(0), [])
        found += new
        below += new
    return found


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _zombies() -> set[int]:
    """Find zombies below this process. Other tests may have left some."""
    return {pid for pid in _descendants() if _state(pid) == "Z"}


def _wait_for_the_end_of(processes: list[int]) -> None:
    """Wait for processes to end. They may remain zombies until the init process, their new parent, reaps them."""
    deadline = time.monotonic() + 10
    while any(_state(pid) not in (None, "Z") for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def others() -> frozenset[int]:
    """The processes of other tests' verifiers."""
    return frozenset(_descendants())


@pytest.fixture
def alone(others: frozenset[int]) -> Iterator[MathVerifier]:
    """A verifier that is checked to leave no processes behind."""
    maths = MathVerifier(Limits(cpu_s=0.4, timeout_s=60.0))
    yield maths
    maths.close()
    assert set(_descendants()) <= others


@contextmanager
def _impatient(maths: MathVerifier) -> Iterator[None]:
    """Set the timeouts to two seconds during the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maths, "_limits", replace(maths._limits, timeout_s=2.0))
        patch.setattr(maths._worker, "_timeout_s", 2.0)
        yield


def _of(maths: MathVerifier, others: frozenset[int]) -> tuple[int, int]:
    """Return the process ids of a verifier's zygote and worker."""
    assert maths.verify(*_HALF).right
    zygote, worker = (pid for pid in _descendants() if pid not in others)
    return zygote, worker


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac{1}{2}", "\\dfrac 12", True),
        ("\\frac{1}{2}", "1/2", True),
        ("\\frac{1}{2}", "\\frac{2}{4}", True),
        ("\\frac{1}{2}", "\\frac{1}{3}", False),
        ("\\frac{1}{3}", "0.333", False),
        ("3, 5, 7", "7,5,3", True),
        ("3, 5, 7", "3,5", False),
        ("(1, 2)", "(2, 1)", False),
        ("[1, 2]", "(1, 2)", False),
        ("x = 5", "5", True),
        ("5", "x = 5.", True),
        ("5", "$5$", True),
        ("5", "\\(5\\)", True),
        ("5", "5 \\text{ cm}", True),
        ("5", "\n5\n", True),
        ("5", "6", False),
        ("5", "", False),
        ("5", "5 or 6", False),
        ("10,\\!080", "7! \\times 2!", True),
        ("\\$36", "36.00", True),
        ("-2 + 7i", "7i - 2", True),
        ("\\text{east}", "east", True),
        ("\\text{east}", "seat", False),
        ("\\text{(C)}", "C", True),
        ("\\text{even}", "odd", False),
        ("x \\in [-2, 7]", "[-2, 7]", True),
        ("[-2, 7]", "-2 \\le x \\le 7", True),
        ("\\begin{pmatrix} 1/2 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}\\frac12\\\\2\\end{pmatrix}", True),
        ("\\sqrt{53}", "\\sqrt 53", False),
        ("2\\sqrt{3}", "\\sqrt{12}", True),
        ("\\text{June 20}", "\\text{June 21}", False),
    ],
)
def test_answers_are_compared_mathematically(maths: MathVerifier, gold: str, answer: str, right: bool) -> None:
    verdict = maths.verify(gold, answer)
    assert (verdict.right, verdict.outcome) == (right, Outcome.GRADED)


_HOSTILE = {
    "power tower": "9^{9^{9^9}}",
    "factorial": "10^8!",
    "nested parentheses": "(" * 2_000 + "1" + ")" * 2_000,
    "nested braces": "{" * 900,
    "large power": "(x+y+z+w+1)^{60}",
    "large power of two": "2^{10000000000}",
    "one megabyte of digits": "9" * 1_000_000,
    "chain of fractions": "\\frac" * 5_000,
    "nested fractions": "\\frac{1}{" * 300 + "1" + "}" * 300,
    "nested roots": "\\sqrt{" * 300 + "x" + "}" * 300,
    "sum": "\\sum_{k=1}^{10^{10}} k^{-3}",
    "product": "\\prod_{k=1}^{1000000} k",
    "lone surrogate": "\ud800",
    "nul": "1\x00",
    "megabyte of nul": "\x00" * 1_000_000,
    "lines": "1\n" * 100_000 + '{"gold": "1"}\n',
    "code": "__import__('os').system('touch /tmp/hostile')",
}


@pytest.mark.parametrize("answer", _HOSTILE.values(), ids=list(_HOSTILE))
def test_hostile_answers_take_bounded_time_and_the_next_is_judged(
    strict: MathVerifier, answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    zombies, start = _zombies(), time.monotonic()
    verdict = strict.verify("\\frac{x^2 + 1}{2}", answer)
    assert time.monotonic() - start < _WALL_S + _SLACK_S
    assert not verdict.right
    assert len(verdict.detail) < 200
    assert strict.verify(*_HALF).right
    assert capfd.readouterr() == ("", "")
    assert _zombies() <= zombies


def test_an_overlong_answer_is_wrong(maths: MathVerifier) -> None:
    verdict = maths.verify("5", "5" + " " * 1_000)
    assert (verdict.right, verdict.outcome) == (False, Outcome.GRADED)
    assert verdict.detail == "the answer has 1001 characters; more than 1000 are not read"


def test_exceeding_the_cpu_limit_is_a_timeout(strict: MathVerifier) -> None:
    verdict = strict.verify("5", _ENDLESS)
    assert (verdict.right, verdict.outcome) == (False, Outcome.TIMEOUT)
    assert verdict.detail == "the comparison took more than 0.4 s of CPU"


def test_exceeding_the_wall_limit_is_a_timeout(alone: MathVerifier, others: frozenset[int]) -> None:
    _, worker = _of(alone, others)
    os.kill(worker, signal.SIGSTOP)
    start = time.monotonic()
    with _impatient(alone):
        verdict = alone.verify(*_HALF)
    assert 2.0 <= time.monotonic() - start < 2.0 + _SLACK_S
    assert (verdict.outcome, verdict.detail) == (Outcome.TIMEOUT, "the comparison took more than 2 s")
    assert alone.verify(*_HALF).right
    assert _state(worker) is None


def test_a_crash_is_an_error_and_the_next_answer_is_judged(alone: MathVerifier, others: frozenset[int]) -> None:
    zygote, worker = _of(alone, others)
    os.kill(worker, signal.SIGSEGV)
    verdict = alone.verify(*_HALF)
    assert (verdict.right, verdict.outcome) == (False, Outcome.ERROR)
    assert verdict.detail == "the comparison's process was ended by signal 11"
    assert alone.verify(*_HALF).right
    zygote, worker = _of(alone, others)
    os.kill(zygote, signal.SIGKILL)
    _wait_for_the_end_of([worker])
    assert alone.verify(*_HALF).outcome is Outcome.ERROR
    assert alone.verify(*_HALF).right


def test_a_hung_zygote_is_replaced(
    alone: MathVerifier, others: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_KILL_S", 0.3)
    zygote, worker = _of(alone, others)
    for pid in (worker, zygote):
        os.kill(pid, signal.SIGSTOP)
    with _impatient(alone):
        assert alone.verify(*_HALF).outcome is Outcome.TIMEOUT
    assert _state(zygote) is None
    assert alone.verify(*_HALF).right


def test_a_worker_that_cannot_start_is_an_error(
    tmp_path: Path, others: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, slow = tmp_path / "broken.py", tmp_path / "slow.py"
    broken.write_text("import no_such_module")
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(process, "_KILL_S", 0.3)
    worker = process.KillableWorker(broken, [], start_timeout_s=60, timeout_s=1)
    with pytest.raises(process.WorkerStartError, match=r"cannot be imported \(exit status 1\)"):
        worker.request(b"{}\n")
    worker = process.KillableWorker(slow, [], start_timeout_s=0.3, timeout_s=1)
    with pytest.raises(process.WorkerStartError, match=r"did not start within 0.3 s"):
        worker.request(b"{}\n")
    assert set(_descendants()) <= others


def test_a_worker_is_replaced_after_its_number_of_answers(others: frozenset[int]) -> None:
    maths = MathVerifier(Limits(answers_per_worker=2))
    workers = []
    for _ in range(3):
        workers.append(_of(maths, others)[1])
        assert maths.verify(*_HALF).right
    assert len(set(workers)) == 3
    maths.close()


def test_every_thread_gets_its_own_verdict(maths: MathVerifier) -> None:
    def judge(number: int) -> bool:
        return maths.verify(f"\\frac{{{number}}}{{2}}", str(number / 2 + number % 3)).right

    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(judge, range(1, 100, 2)))
    assert verdicts == [number % 3 == 0 for number in range(1, 100, 2)]


def test_the_processes_outlive_the_thread_that_started_them(alone: MathVerifier, others: frozenset[int]) -> None:
    thread = Thread(target=alone.verify, args=_HALF)
    thread.start()
    thread.join()
    processes = tuple(pid for pid in _descendants() if pid not in others)
    time.sleep(0.2)
    assert _of(alone, others) == processes


def test_an_interrupted_request_does_not_answer_the_next(maths: MathVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(worker: socket.socket, request: bytes, deadline: float) -> bytes:
        worker.sendall(request)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            maths.verify(*_HALF)
    assert not maths.verify("\\frac12", "0.6").right


_PARENT = """
import sys
from rewards.maths import Limits, MathVerifier
maths = MathVerifier(Limits(cpu_s=60, timeout_s=60))
maths.verify("5", "10/2")
print("ready", flush=True)
maths.verify("5", sys.argv[1])
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_worker_processes_end_with_their_parent(end: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, _ENDLESS], cwd=_ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    processes = _descendants(parent.pid)
    assert len(processes) == 2
    parent.send_signal(end)
    parent.communicate(timeout=10)
    _wait_for_the_end_of(processes)


def test_a_garbage_collected_verifier_leaves_no_process(others: frozenset[int]) -> None:
    maths = MathVerifier()
    assert len(_of(maths, others)) == 2
    del maths
    assert set(_descendants()) <= others


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\dfrac{\\pi}{2})", True),
        ("10,\\!080", "10{,}080", True),
        ("10{\\left,} 080", "10{,}080", True),
        ("1,234", "1, 234", False),
        ("1, 2", "1,2", True),
        ("5.", "$5$", True),
        ("\\$5", "5", True),
        ("\\text{June 20}", "\\text{June  20}", True),
        ("\\sin x", "\\sin  x", True),
        ("1 2", "12", False),
        ("0.5", "05", False),
        (".5", "5", False),
        ("11,\\! 111", "11,111", True),
        ("1 \\\\ 2", "1 \\ 2", False),
        ("", "", False),
        ("$$", ".", False),
    ],
)
def test_equal_spellings_are_recognized(a: str, b: str, alike: bool) -> None:
    assert same_spelling(a, b) == alike == same_spelling(b, a)


@given(st.lists(st.sampled_from(["\\left", "(", "1", "23", "x", ",", " ", "\\frac", "{", "}", ".", "\\!", "$"])))
def test_normalizing_a_spelling_is_idempotent(pieces: list[str]) -> None:
    spelling = normalized_latex("".join(pieces))
    assert normalized_latex(spelling) == spelling


@pytest.mark.skipif(not _DATA.is_file(), reason="needs shared/data beside the repository")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_equal_spellings_are_mathematically_equal(
    maths: MathVerifier, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    golds = {json.loads(line)["ground_truth"] for line in _DATA.read_text().splitlines()}
    monkeypatch.setattr(verifier, "same_spelling", lambda a, b: False)
    for gold in sorted(golds)[::every]:
        for respelling in (normalized_latex(gold), f"$ {gold} $.", gold.replace("\\frac", "\\dfrac")):
            assert same_spelling(gold, respelling)
            assert maths.verify(gold, respelling).right, (gold, respelling)
