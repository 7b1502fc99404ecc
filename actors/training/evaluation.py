"""Evaluation by the learner: when a version is evaluated, its label, and when the result is known.

Between rounds an evaluation is requested together with the next round. The samplers start it after that round's
completions, and the learner collects the result after training on the round. The evaluated version is in a checkpoint
by then, of which the best is kept. No later checkpoint is written before the result, so a resumed run misses no
evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from actors.checkpoints.selection import Position
from actors.messages import Next, WeightsId
from actors.run_log import VALIDATION
from actors.spec import Phase, RunSpec
from actors.training.limits import StopRequestedError
from actors.training.publication import Publisher
from learner.parallel.consensus import Ranks


class EvaluationClient(Protocol):
    """Interface of rank 0 to the coordinator; implemented by `actors/training/run_client.py`."""

    def evaluate(self, weights_id: WeightsId, label: str, round_index: int, *, is_new: bool) -> Next: ...
    def record(self, event: str, values: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BackgroundEvaluation:
    """Background evaluation during a round."""

    position: Position
    """Position of the evaluated version."""
    label: str
    """Its label."""
    weights_id: WeightsId | None
    """The evaluated version; None except on rank 0."""


class Evaluator:
    """Evaluator of the version that was published last: rank 0 requests the evaluation, the other ranks wait."""

    def __init__(self, spec: RunSpec, ranks: Ranks, publisher: Publisher, client: EvaluationClient) -> None:
        self._spec, self._ranks, self._publisher, self._client = spec, ranks, publisher, client
        self.background: BackgroundEvaluation | None = None
        """The background evaluation whose result has not been collected."""

    def is_due(self, position: Position) -> bool:
        """Return whether the recipe requires an evaluation after this round; the end of a stage always does."""
        every = self._spec.evaluation.every_rounds
        return not self._is_between_rounds(position) or (bool(every) and position.round % every == 0)

    def evaluate(self, position: Position, *, is_new: bool = True) -> None:
        """Evaluate the policy of a position; one that is not new, only if the interrupted run has not evaluated it.

        A collective. Raises StopRequestedError if the run must stop.
        """
        for label in self.labels(position):
            self._publisher.request_with_republish(partial(self._answer, label, position.round, is_new=is_new))

    def _answer(self, label: str, round_index: int, *, is_new: bool) -> tuple[Next, None]:
        def ask() -> Next:
            return self._client.evaluate(self._publisher.newest, label, round_index, is_new=is_new)

        return Next(self._ranks.broadcast_decision(ask)), None

    def begin(self, position: Position) -> None:
        """Request an evaluation together with the next round. All ranks call it; nothing is sent yet."""
        (label,) = self.labels(position)
        weights_id = self._publisher.newest if self._ranks.rank == 0 else None
        self.background = BackgroundEvaluation(position=position, label=label, weights_id=weights_id)

    def collect(self) -> None:
        """Wait for the background evaluation. A collective. Raises StopRequestedError if the run must stop."""
        if (background := self.background) is None:
            return

        def ask() -> Next:
            assert background.weights_id is not None, "rank 0 asks"
            what = self._client.evaluate(
                background.weights_id, background.label, background.position.round, is_new=True
            )
            if what is Next.PUBLISH:
                # The policy has been updated since, so that version cannot be published again.
                lost = f"version {background.weights_id.version} was lost with the weight store, and is not evaluated"
                self._client.record("failure", {"what": lost, "attempt": 1})
            return what

        if self._ranks.broadcast_decision(ask) == Next.STOP:
            raise StopRequestedError
        self.background = None

    def labels(self, position: Position) -> tuple[str, ...]:
        """Return the labels of the evaluations at a position.

        `validation` is the one for checkpoint selection. At the end of a stage there is also the stage's name, for the
        result on held-out problems; before the first stage, `untrained` or `start`. Without validation problems, the
        label between rounds is `round`.
        """
        has_validation = self._spec.evaluation.num_validation > 0
        if self._is_between_rounds(position):
            return (VALIDATION if has_validation else "round",)
        if position.phase is Phase.UNTRAINED and Phase.SFT in self._spec.phases:
            return ("untrained",)
        stage = "start" if position.phase is Phase.UNTRAINED else str(position.phase)
        # The control's policy is no candidate for checkpoint selection.
        return (VALIDATION, stage) if has_validation and position.phase is not Phase.CONTROL else (stage,)

    def _is_between_rounds(self, position: Position) -> bool:
        return position.phase is Phase.RL and position.round < self._spec.learner.num_rounds
