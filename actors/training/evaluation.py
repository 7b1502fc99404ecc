"""Held-out accuracy: when a version is evaluated, under which name, and what is known by when.

Between the rounds an evaluation is asked for with the next round: the samplers get to it when they have sampled that,
and the learner hears of it when it has trained on it. What it was of is in a checkpoint by then, of which the best is
kept, and no later checkpoint is written before: whoever goes on from one misses no evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from actors.checkpoints.selection import Position
from actors.messages import Generation, Next
from actors.run_log import VALIDATION
from actors.spec import Phase, RunSpec
from actors.training.ending import StopRequestedError
from actors.training.publication import Publisher
from learner.parallel.ranks import Ranks


class EvaluationClient(Protocol):
    """Whom rank 0 asks for it: `actors/training/run_client.py`."""

    def evaluate(self, generation: Generation, label: str, round_index: int, *, is_new: bool) -> Next: ...
    def record(self, event: str, values: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """An evaluation beside a round."""

    position: Position
    """Where the run stood."""
    label: str
    """What it is called."""
    generation: Generation | None
    """The version; None but on rank 0."""


class Evaluator:
    """Asks on rank 0 for an evaluation of what was published last; the other ranks wait for it."""

    def __init__(self, spec: RunSpec, ranks: Ranks, publisher: Publisher, client: EvaluationClient) -> None:
        self._spec, self._ranks, self._publisher, self._client = spec, ranks, publisher, client
        self.begun: Begun | None = None
        """What was asked for with the round under way, and is not heard yet."""

    def is_due(self, position: Position) -> bool:
        """Whether the recipe asks for one after this round; at the end of a stage there is one in any case."""
        every = self._spec.evaluation.every_rounds
        return not self._is_between_rounds(position) or (bool(every) and position.round % every == 0)

    def evaluate(self, position: Position, *, is_new: bool = True) -> None:
        """Evaluate the policy of a position; one that is not new, only where the interrupted run did not get to it.

        A collective. Raises StopRequestedError where the run is to stop.
        """
        for label in self.labels(position):
            self._publisher.answered(partial(self._answer, label, position.round, is_new=is_new))

    def _answer(self, label: str, round_index: int, *, is_new: bool) -> tuple[Next, None]:
        def ask() -> Next:
            return self._client.evaluate(self._publisher.newest, label, round_index, is_new=is_new)

        return Next(self._ranks.agreed(ask)), None

    def begin(self, position: Position) -> None:
        """Ask for it with the next round. All ranks do; nothing is sent."""
        (label,) = self.labels(position)
        generation = self._publisher.newest if self._ranks.rank == 0 else None
        self.begun = Begun(position=position, label=label, generation=generation)

    def hear(self) -> None:
        """Wait for what was begun. A collective. Raises StopRequestedError where the run is to stop."""
        if (begun := self.begun) is None:
            return

        def ask() -> Next:
            assert begun.generation is not None, "rank 0 asks"
            what = self._client.evaluate(begun.generation, begun.label, begun.position.round, is_new=True)
            if what is Next.PUBLISH:
                # The policy is another by now.
                lost = f"version {begun.generation.version} was lost with the weight store, and is not evaluated"
                self._client.record("failure", {"what": lost, "attempt": 1})
            return what

        if self._ranks.agreed(ask) == Next.STOP:
            raise StopRequestedError
        self.begun = None

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
