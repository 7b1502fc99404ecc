"""The reward of a completion: the weighted sum of the task's reward parts and the recipe's terms."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from rewards.problem import Grade, Outcome, Task
from rewards.sample import Sample, TextBlock
from rewards.tasks.registry import TaskConfig, make_task
from rewards.terms.registry import AnyTermConfig, make_term
from rewards.terms.term import BlockValues, NoValue, Value

TermName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,39}$")]


class RewardConfig(BaseModel):
    """The training reward: the task's grade plus additional terms. Evaluation uses only the task's grade."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    task_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Factor applied to each part of the task's reward."""
    ungraded: Literal["mask", "zero"] = "mask"
    """What to do with a completion whose grading timed out or failed: `mask` leaves it out of the update, `zero` gives
    it a reward of 0. Either way it is counted."""
    terms: dict[TermName, AnyTermConfig] = {}
    """Additional reward terms. The key is the name of the reward part, `kind` selects the type of term."""

    def check(self, task_parts: Collection[str]) -> None:
        """Raise ValueError if a term cannot work here or has the same name as a part of the task's reward."""
        for name, term in self.terms.items():
            if name in task_parts:
                raise ValueError(f"terms.{name}: the task's reward has a part of that name; take another")
            try:
                term.check()
            except ValueError as error:
                raise ValueError(f"terms.{name}: {error}") from error

    def resolved(self) -> Self:
        """Return a copy with absolute paths."""
        return self.model_copy(update={"terms": {name: term.resolved() for name, term in self.terms.items()}})


class Grader:
    """Grades completions with a task's grader and the terms of its reward."""

    def __init__(self, task: TaskConfig, reward: RewardConfig) -> None:
        """Create the task and the terms. Raises ValueError if a term cannot work here."""
        self._task: Task = make_task(task)
        self._reward = reward
        self._terms = {name: make_term(config) for name, config in reward.terms.items()}

    def evaluate(self, samples: Sequence[Sample]) -> list[Grade]:
        """Return the task's own grade of each sample, for evaluation. Terms are not computed."""
        return [task_grade(self._task, sample) for sample in samples]

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Return the grade of each sample with all of its parts; `reward` is exactly their sum.

        Terms are computed only for samples that could be graded so far. If a term has no value for a sample, its grade
        becomes an error. Raises RewardUnavailableError if a service that a term depends on does not answer.
        """
        grades = [self._weighted(grade) for grade in self.evaluate(samples)]
        graded = [index for index, grade in enumerate(grades) if grade.outcome is Outcome.GRADED]
        for name, term in self._terms.items():
            values = term.values([samples[index] for index in graded])
            for index, value in zip(graded, values, strict=True):
                grades[index] = _with_term(
                    grades[index], name, self._reward.terms[name].weight, value, samples[index].blocks
                )
            graded = [index for index in graded if grades[index].outcome is Outcome.GRADED]
        is_zeroed = self._reward.ungraded == "zero"
        return [grade if grade.outcome is Outcome.GRADED else _ungraded(grade, is_zeroed) for grade in grades]

    def take_costs(self) -> Mapping[str, float]:
        """Return what the terms spent since the last call, keyed by `TERM/WHAT`."""
        return {
            f"{name}/{what}": count for name, term in self._terms.items() for what, count in term.take_costs().items()
        }

    def _weighted(self, grade: Grade) -> Grade:
        if self._reward.task_weight == 1:
            return grade
        parts = {name: self._reward.task_weight * value for name, value in grade.parts.items()}
        return replace(grade, parts=parts, reward=sum(parts.values()))


def task_grade(task: Task, sample: Sample) -> Grade:
    """Return the task's grade. An exception of the grader becomes a grade with outcome `ERROR`, which is counted."""
    try:
        return task.grade(sample.problem, sample.text)
    except Exception as error:
        detail = f"the grader failed on {sample.problem.problem_id}: {type(error).__name__}: {error}"
        return Grade(reward=0.0, parts={}, correct=False, outcome=Outcome.ERROR, detail=detail)


def _with_term(grade: Grade, name: str, weight: float, value: Value, blocks: Sequence[TextBlock]) -> Grade:
    if isinstance(value, NoValue):
        return replace(grade, outcome=Outcome.ERROR, detail=f"{name}: {value.detail}")
    if isinstance(value, BlockValues):
        before = grade.block_rewards or [(block.end, 0.0) for block in blocks]
        added = zip(before, value.values, strict=True)
        grade = replace(grade, block_rewards=tuple((end, reward + weight * own) for (end, reward), own in added))
        value = sum(value.values)
    parts = {**grade.parts, name: weight * value}
    return replace(grade, parts=parts, reward=sum(parts.values()))


def _ungraded(grade: Grade, is_zeroed: bool) -> Grade:
    return replace(grade, reward=0.0, parts={}, block_rewards=None, is_zeroed=is_zeroed)
