"""Which version of a run is the best: by validation problems, so that the held-out ones choose nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from actors.run_log import VALIDATION, Event

# Where a run without validation problems has its accuracies from; `actors.spec.Phase` has the latter, and takes torch.
_HELDOUT = ("round", "rl")


def best_version(events: Sequence[Event]) -> int | None:
    """The version with the best validation accuracy, that from which the rounds began among them; None where none was
    evaluated. In a run without validation problems that of the rounds with the best held-out accuracy.

    The oldest of several: an accuracy that stays where it is, at 0 too, writes no checkpoint each time. Of those of one
    version, as after a restart, the later counts.
    """
    labels = (VALIDATION,) if has_validation(events) else _HELDOUT
    found = {
        event["policy_version"]: event["num_correct"] / event["num_problems"]
        for event in standing_evaluations(events)
        if event["label"] in labels
    }
    return max(found, key=lambda version: (found[version], -version), default=None)


def validated_best(events: Sequence[Event]) -> int | None:
    """What the alias `best` means: nothing in a run without validation problems, for it would be chosen by the test."""
    return best_version(events) if has_validation(events) else None


def standing_evaluations(events: Sequence[Event]) -> list[Event]:
    """The evaluations of weights that a run still has, in their order: a resumed run does the rounds after its
    checkpoint again, and what was later is gone."""
    standing, later = [], math.inf
    for event in reversed(events):
        if event["event"] == "round":
            later = min(later, event["policy_version"])
        elif event["event"] == "evaluation" and event["policy_version"] < later:
            standing.append(event)
    return standing[::-1]


def has_validation(events: Iterable[Event]) -> bool:
    """Whether the run has asked validation problems."""
    return any(event["event"] == "evaluation" and event["label"] == VALIDATION for event in events)
