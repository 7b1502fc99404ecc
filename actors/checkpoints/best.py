"""Best policy version of a run, by validation accuracy: held-out problems select nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from actors.run_log import VALIDATION, Event

# Labels of the held-out accuracies that replace it in runs without validation problems. "rl" is `actors.spec.Phase.RL`,
# whose import would load torch.
_HELDOUT = ("round", "rl")


def best_version(events: Sequence[Event]) -> int | None:
    """Return the version with the best validation accuracy, including the one that the rounds started from.

    Without validation problems it is the version of the rounds with the best held-out accuracy. None if no version was
    evaluated.

    Ties go to the oldest version: a constant accuracy, such as 0, then writes no checkpoint each time. If a version was
    evaluated twice, as after a restart, the later result counts.
    """
    labels = (VALIDATION,) if has_validation(events) else _HELDOUT
    found = {
        event["policy_version"]: event["num_correct"] / event["num_problems"]
        for event in current_evaluations(events)
        if event["label"] in labels
    }
    return max(found, key=lambda version: (found[version], -version), default=None)


def validated_best(events: Sequence[Event]) -> int | None:
    """Return the version for the alias `best`; None without validation problems, as the test set would select it."""
    return best_version(events) if has_validation(events) else None


def current_evaluations(events: Sequence[Event]) -> list[Event]:
    """Return the evaluations of weights that a run still has, in order.

    A resumed run repeats the rounds after its checkpoint, so later versions are discarded.
    """
    current, later = [], math.inf
    for event in reversed(events):
        if event["event"] == "round":
            later = min(later, event["policy_version"])
        elif event["event"] == "evaluation" and event["policy_version"] < later:
            current.append(event)
    return current[::-1]


def has_validation(events: Iterable[Event]) -> bool:
    """Return whether the run has evaluated validation problems."""
    return any(event["event"] == "evaluation" and event["label"] == VALIDATION for event in events)
