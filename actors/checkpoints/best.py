"""Best policy version of a run, by validation accuracy: held-out problems select nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.run_log import VALIDATION, Event
from rewards.score import Score

# Labels of the held-out accuracies that replace it in runs without validation problems. "rl" is `actors.spec.Phase.RL`,
# whose import would load torch.
_HELDOUT = ("round", "rl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Result of an evaluation at its first schedule."""

    label: str
    """Its label, as in the `evaluation` event."""
    policy_version: int
    """The version that was evaluated."""
    score: Score
    """Number of problems solved."""


class Evaluations:
    """Evaluations of weights that a run still has, and the best version among them.

    A resumed run repeats the rounds after its checkpoint, so later versions are discarded.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Begin with some events."""
        self.current: list[Evaluated] = []
        """In order."""
        self.has_validation = False
        """Whether the run has evaluated validation problems."""
        self._highest = -1
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add the next event, of any kind."""
        if event["event"] == "round":
            self._discard_from(event["policy_version"])
        elif event["event"] == "evaluation":
            score = Score(num_correct=event["num_correct"], num_problems=event["num_problems"])
            self.current.append(Evaluated(label=event["label"], policy_version=event["policy_version"], score=score))
            self.has_validation |= event["label"] == VALIDATION
            self._highest = max(self._highest, event["policy_version"])

    def best(self) -> int | None:
        """Return the version with the best validation accuracy, including the one that the rounds started from.

        Without validation problems it is the version of the rounds with the best held-out accuracy. None if no version
        was evaluated.

        Ties go to the oldest version: a constant accuracy, such as 0, then writes no checkpoint each time. If a version
        was evaluated twice, as after a restart, the later result counts.
        """
        labels = (VALIDATION,) if self.has_validation else _HELDOUT
        found = {one.policy_version: one.score.accuracy for one in self.current if one.label in labels}
        return max(found, key=lambda version: (found[version], -version), default=None)

    def validated_best(self) -> int | None:
        """Return the version for the alias `best`; None without validation problems, as the test set would select
        it."""
        return self.best() if self.has_validation else None

    def _discard_from(self, version: int) -> None:
        # Only after a restart: a look at all evaluations in every round would take quadratic time.
        if version <= self._highest:
            self.current = [one for one in self.current if one.policy_version < version]
            self._highest = max((one.policy_version for one in self.current), default=-1)


def validated_best(events: Iterable[Event]) -> int | None:
    """Return the version for the alias `best`, as `Evaluations.validated_best` does."""
    return Evaluations(events).validated_best()
