"""Which version of a run is the best: by validation problems, so that the held-out ones choose nothing."""

from __future__ import annotations

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
    found: dict[int, float] = {}
    for event in events:
        if event["event"] == "round":
            # A resumed run does the rounds after its checkpoint again: what was later is gone.
            found = {version: share for version, share in found.items() if version < event["policy_version"]}
        elif event["event"] == "evaluation" and event["label"] in labels:
            found[event["policy_version"]] = event["num_correct"] / event["num_problems"]
    return max(found, key=lambda version: (found[version], -version), default=None)


def validated_best(events: Sequence[Event]) -> int | None:
    """What the alias `best` means: nothing in a run without validation problems, for it would be chosen by the test."""
    return best_version(events) if has_validation(events) else None


def has_validation(events: Iterable[Event]) -> bool:
    """Whether the run has asked validation problems."""
    return any(event["event"] == "evaluation" and event["label"] == VALIDATION for event in events)
