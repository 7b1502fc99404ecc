"""What is graded: a completion's text, and the little that a reward may depend on beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewards.problem import Problem, chat


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion of a problem, as graders see it."""

    problem: Problem
    """What was asked."""
    text: str
    """The completion up to its end of text. A model's, and so hostile."""
    num_tokens: int
    """Tokens of the completion up to and with its first end of text."""
    num_forwards: int
    """Forwards of the policy that it took part in."""
    max_tokens: int
    """Tokens that it had room for."""
    is_truncated: bool
    """Whether it filled that room without an end of text."""

    def facts(self) -> dict[str, Any]:
        """What custom rewards are given, as JSON values by name: see docs/rewards.md."""
        problem = self.problem
        return {
            "problem_id": problem.problem_id,
            "messages": chat(problem.messages),
            "completion": self.text,
            "answer": problem.answer,
            "metadata": dict(problem.metadata),
            "num_tokens": self.num_tokens,
            "num_forwards": self.num_forwards,
            "is_truncated": self.is_truncated,
        }
