"""Held-out accuracy: when a version is evaluated, under which name, and whether it is the best so far."""

from __future__ import annotations

from typing import Protocol

from actors.checkpoints.selection import Position
from actors.messages import Generation, Next
from actors.run_log import VALIDATION
from actors.spec import Phase, RunSpec
from actors.training.publication import Publisher
from learner.parallel.ranks import Ranks


class EvaluationClient(Protocol):
    """Whom rank 0 asks for it: `actors/training/run_client.py`."""

    def evaluate(self, generation: Generation, label: str, round_index: int, *, is_new: bool) -> tuple[Next, bool]: ...


class Evaluator:
    """Asks on rank 0 for an evaluation of what was published last; the other ranks wait for it."""

    def __init__(self, spec: RunSpec, ranks: Ranks, publisher: Publisher, client: EvaluationClient) -> None:
        self._spec, self._ranks, self._publisher, self._client = spec, ranks, publisher, client

    def is_due(self, position: Position) -> bool:
        """Whether the recipe asks for one after this round; at the end of a stage there is one in any case."""
        every = self._spec.evaluation.every_rounds
        return not self._is_between_rounds(position) or (bool(every) and position.round % every == 0)

    def evaluate(self, position: Position, *, is_new: bool = True) -> bool:
        """Evaluate the policy of a position; one that is not new, only where the interrupted run did not get to it.

        A collective. Returns whether it is the best of the rounds so far. Raises StopRequestedError where the run is to
        stop.
        """
        answers = [self._answer(label, position.round, is_new=is_new) for label in self.labels(position)]
        return answers[-1]

    def _answer(self, label: str, round_index: int, *, is_new: bool) -> bool:
        def ask() -> tuple[Next, bool]:
            return self._client.evaluate(self._publisher.newest, label, round_index, is_new=is_new)

        return bool(self._publisher.answered(lambda: self._ranks.agreed(ask)))

    def labels(self, position: Position) -> tuple[str, ...]:
        """What the evaluations at a position are called: `validation` for those that a checkpoint is chosen by, else
        the stage whose end is told by the held-out problems."""
        has_validation = self._spec.evaluation.num_validation > 0
        if self._is_between_rounds(position):
            return (VALIDATION if has_validation else "round",)
        if position.phase is Phase.UNTRAINED and Phase.SFT in self._spec.phases:
            return ("untrained",)
        stage = "start" if position.phase is Phase.UNTRAINED else str(position.phase)
        # The control is another policy than those that are chosen from.
        return (VALIDATION, stage) if has_validation and position.phase is not Phase.CONTROL else (stage,)

    def _is_between_rounds(self, position: Position) -> bool:
        return position.phase is Phase.RL and position.round < self._spec.learner.num_rounds
