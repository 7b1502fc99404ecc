"""Math-Verify in a worker process, with limits on time, memory and length."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from rewards.maths.answer_parser import read_pair
from rewards.maths.process import KillableWorker, WorkerEndedError, WorkerStartError
from rewards.maths.spelling import same_spelling
from rewards.maths.units import are_different
from rewards.problem import Outcome

_REPLACING_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one comparison."""

    cpu_s: float = 2.0
    """CPU seconds. Real answers need up to 0.3."""
    timeout_s: float = 10.0
    """Wall-clock seconds; more than `cpu_s`, for busy machines."""
    memory_bytes: int = 1 << 30
    """Address space of the worker; sympy itself takes about 100 MiB."""
    max_chars: int = 1000
    """Longer answers are wrong without being read."""
    start_timeout_s: float = 120.0
    """Seconds until the imports have finished: one or two on an idle machine."""
    answers_per_worker: int = 2000
    """A worker is replaced after this many answers, since sympy caches its results."""

    @property
    def max_comparison_s(self) -> float:
        """Maximum seconds of one comparison, including killing and replacing its worker."""
        return self.timeout_s + _REPLACING_S


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerVerdict:
    """Result of a comparison."""

    right: bool = False
    """Whether the answer is equivalent to the gold answer."""
    outcome: Outcome = Outcome.GRADED
    """`TIMEOUT` and `ERROR` say nothing about the answer."""
    detail: str = ""
    """The reason for a negative or missing verdict, if known."""


class MathVerifier:
    """Compares answers in one worker process, which starts with the first comparison that needs it.

    Thread-safe; comparisons run one at a time, each within the limits. Use several verifiers for more throughput.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits = limits or Limits()
        arguments = [str(limits.cpu_s), str(limits.memory_bytes), str(limits.answers_per_worker)]
        self._worker = KillableWorker(
            Path(__file__).with_name("zygote.py"),
            arguments,
            start_timeout_s=limits.start_timeout_s,
            timeout_s=limits.timeout_s,
        )
        self._turn = Lock()

    def verify(self, gold: str, answer: str) -> AnswerVerdict:
        """Judge whether `answer` is equivalent to `gold`; both are LaTeX or plain text. Never raises."""
        if len(answer) > self._limits.max_chars:
            return AnswerVerdict(
                detail=f"the answer has {len(answer)} characters; more than {self._limits.max_chars} are not read"
            )
        if same_spelling(gold, answer):
            return AnswerVerdict(right=True)
        right, given = read_pair(gold, answer)
        if are_different(right.unit, given.unit):
            return AnswerVerdict(detail="the answer is in another unit")
        if right.percent == given.percent and same_spelling(right.expression, given.expression):
            return AnswerVerdict(right=True)
        request = {
            "gold": right.expression,
            "answer": given.expression,
            "gold_percent": right.percent,
            "answer_percent": given.percent,
        }
        with self._turn:
            return self._compare(json.dumps(request).encode() + b"\n")

    def close(self) -> None:
        """Stop the processes. They restart when they are needed."""
        with self._turn:
            self._worker.close()

    def _compare(self, request: bytes) -> AnswerVerdict:
        try:
            reply = json.loads(self._worker.request(request))
        except TimeoutError:
            return AnswerVerdict(
                outcome=Outcome.TIMEOUT, detail=f"the comparison took more than {self._limits.timeout_s:g} s"
            )
        except WorkerEndedError as error:
            return self._ended(*error.args)
        except WorkerStartError as error:
            return AnswerVerdict(outcome=Outcome.ERROR, detail=str(error))
        if reply["worn"]:
            self._worker.end_worker()
        if "error" in reply:
            return AnswerVerdict(outcome=Outcome.ERROR, detail=f"the comparison raised {reply['error']}")
        return AnswerVerdict(right=reply["right"])

    def _ended(self, by: int) -> AnswerVerdict:
        if by == signal.SIGPROF:
            limit = f"the comparison took more than {self._limits.cpu_s:g} s of CPU"
            return AnswerVerdict(outcome=Outcome.TIMEOUT, detail=limit)
        return AnswerVerdict(outcome=Outcome.ERROR, detail=f"the comparison's process was ended by signal {by}")
