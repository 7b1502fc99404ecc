"""Input of the graders: a completion's text and the few facts about it that a reward may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewards.problem import Problem, chat


@dataclass(frozen=True, slots=True)
class TextBlock:
    """The text that the sampler denoised as one block."""

    text: str
    """Its text, up to the completion's end. A character whose bytes are in two blocks is U+FFFD in both."""
    end: int
    """Tokens of the completion up to the end of the block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion of a problem, as graders see it."""

    problem: Problem
    """The problem that it answers."""
    text: str
    """The completion up to its end-of-text token. Model output, so untrusted."""
    num_tokens: int
    """Tokens of the completion, up to and including its first end-of-text token."""
    num_forwards: int
    """Forward passes of the policy that it took part in."""
    max_tokens: int
    """Maximum number of tokens."""
    is_truncated: bool
    """Whether it reached `max_tokens` without an end of text."""
    blocks: tuple[TextBlock, ...] = ()
    """The sampler's blocks, in order, for rewards of single blocks; empty for an evaluation."""

    def reward_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of custom rewards as JSON values; see docs/rewards.md."""
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
            "blocks": [block.text for block in self.blocks],
        }
