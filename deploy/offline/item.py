"""Items of offline work: a prompt, problem or generation in, a completion with its grade out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.requests.families import AnyRequest
from deploy.requests.planner import RequestPlan
from rewards import Grade, Problem, Sample, TaskConfig
from rollout.renoising.request import RenoisedCompletion
from rollout.request import Completion

AnyCompletion = Completion | RenoisedCompletion


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Unit of offline work: a request to sample, a problem to sample and grade, or a generation to grade."""

    index: int
    """Index of its request, problem or line, from 0."""
    place: str
    """Name in messages."""
    id: Any = None
    """Id of its request, as given; None without one."""
    sample: int = 0
    """Index among the completions of its request or problem, from 0."""
    num_samples: int = 1
    """Completions of its request or problem."""
    request: AnyRequest | None = None
    """Request to the sampler; None: rejected, or a generation to grade."""
    plan: RequestPlan | None = None
    """Plan of the request, which says where its text ends; None: at the policy's stop ids."""
    problem: Problem | None = None
    """Problem that the completion answers; None: it is not graded."""
    text: str = ""
    """Generation to grade; empty if the item is sampled."""
    error: str = ""
    """Reason for the rejection; empty if there is none."""

    @property
    def asked(self) -> tuple[Problem, AnyRequest]:
        """Problem and request of an item that is sampled and graded."""
        assert self.problem is not None, "it is graded"
        assert self.request is not None, "it is sampled"
        return self.problem, self.request


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Items that one worker takes together: the same in every attempt, since a logit's last bits depend on it."""

    index: int
    """Index in the work of a command."""
    items: tuple[Item, ...]
    """Items, in order."""
    task: TaskConfig | None = None
    """Task that grades the completions; None: they are not graded."""
    grades_whole_canvas: bool = False
    """Whether the whole canvas is graded, with its special tokens as text, as in the first d1."""
    has_room: bool = True
    """Whether the prompts leave room for a completion. Otherwise the answers count as wrong, without sampling."""

    @property
    def requests(self) -> list[Any]:
        """Requests to the sampler, all of one policy family; None if the items are only graded."""
        return [item.request for item in self.items]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Completion or generation with its grade: a line of the evaluation's record, which `d1 grade` reads too."""

    problem_id: str
    sample: int
    question: str
    generation: str
    ground_truth: str
    answer: str | None
    correct: bool
    num_right: int
    num_items: int
    outcome: str
    detail: str
    num_tokens: int
    num_forwards: int
    is_truncated: bool
    has_room: bool = True
    """Whether the prompt left room for a completion. If not, nothing was sampled."""
    reward: float = 0.0
    """The task's reward, without the terms of a recipe."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward."""


def answer_of(sample: Sample, number: int, grade: Grade) -> Answer:
    """Return the answer for a graded completion; `number` is its sample index within the problem."""
    return Answer(
        problem_id=sample.problem.problem_id,
        sample=number,
        question=sample.problem.messages[-1].content,
        generation=sample.text,
        ground_truth=sample.problem.answer,
        answer=grade.answer,
        correct=grade.correct,
        num_right=grade.score[0],
        num_items=grade.score[1],
        outcome=grade.outcome.value,
        detail=grade.detail,
        num_tokens=sample.num_tokens,
        num_forwards=sample.num_forwards,
        is_truncated=sample.is_truncated,
        reward=grade.reward,
        parts=dict(grade.parts),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredBatch:
    """Completed batch."""

    index: int
    """Index of the batch."""
    completions: Sequence[AnyCompletion] = ()
    """Completions, in order of the items; empty if nothing was sampled, or the batch was read from a record."""
    answers: tuple[Answer, ...] = ()
    """Answers, in order of the items; empty if the batch has no task."""
    seconds: float = 0.0
    """Time of the worker, in seconds."""
