"""Rebuild the registry from the run directory, if it is new or Redis has lost its data."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from actors.checkpoints.best import Evaluations
from actors.checkpoints.selection import servable_checkpoints
from actors.event_history import EventHistory
from actors.registry.records import DEFAULT_ADMIN_STATE, AdminState, PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import CHECKPOINTS, Event, iterate_events
from actors.spec import Phase

ADMIN = "admin.json"


def rebuild(registry: Registry, run_dir: Path, newest: PolicyVersion | None = None) -> int:
    """Fill in what the registry lacks of a run. Existing data stays, and a second call does nothing.

    Checkpoints are not verified here, but on loading. `newest` is the version that the caller knows to be the newest:
    without it, a registry that has lost its data would go back to the newest checkpoint.

    Returns how many versions were absent. Raises ConnectionError as the registry does.
    """
    history, rounds = _read(iterate_events(run_dir))
    versions, newest_number = _versions(run_dir, rounds, history.evaluations), None
    if newest is not None:
        known = {policy.version: policy for policy in versions}
        known[newest.version] = newest.with_checkpoint_of(known.get(newest.version))
        versions, newest_number = list(known.values()), newest.version
    return registry.restore(versions, newest_number, history.began_at, history.evaluations.validated_best())


def history_of(run_dir: Path, events: Iterable[Event]) -> list[PolicyVersion]:
    """Return the versions that a service may use, oldest first, with their scores and checkpoints."""
    history, rounds = _read(events)
    return _versions(run_dir, rounds, history.evaluations)


def _read(events: Iterable[Event]) -> tuple[EventHistory, dict[int, int]]:
    """Return the history, and the round of each version, in one pass: a long run has too many events to hold."""
    history, rounds = EventHistory(), dict[int, int]()
    for event in events:
        history.add(event)
        _add_round(rounds, event)
    return history, rounds


def read_admin(run_dir: Path) -> AdminState:
    """Read an operator's settings of the run's service. Raises ValueError if the file is damaged."""
    path = run_dir / ADMIN
    try:
        state = AdminState(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return DEFAULT_ADMIN_STATE
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; pin and pause again, or delete it") from error
    return state


def write_admin(run_dir: Path, state: AdminState) -> None:
    """Write an operator's settings of the run's service atomically. Its engines read them every second."""
    # A unique name, as two operators may write at once.
    temporary = run_dir / f".{ADMIN}.{secrets.token_hex(8)}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(state)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(run_dir / ADMIN)


def _add_round(rounds: dict[int, int], event: Event) -> None:
    """Add an event to the round of each version, ascending. A resumed run repeats the rounds after its checkpoint, so
    later versions are discarded."""
    if event["event"] == "round":
        while rounds and next(reversed(rounds)) >= event["policy_version"]:
            rounds.popitem()
        rounds[event["policy_version"]] = event["round"]


def _versions(run_dir: Path, rounds: Mapping[int, int], evaluations: Evaluations) -> list[PolicyVersion]:
    """Return the versions of the rounds and of the checkpoints, oldest first, with their scores."""
    # An event counts rounds from 0; a version's round is the number of rounds trained.
    versions = {number: _version(number, index + 1, Phase.RL) for number, index in rounds.items()}
    for position, directory in servable_checkpoints(run_dir / CHECKPOINTS):
        known = versions.get(position.policy_version) or _version(
            position.policy_version, position.round, position.phase
        )
        versions[position.policy_version] = replace(
            known, checkpoint=str(directory.resolve()), manifest_digest=position.manifest_digest
        )
    for one in evaluations.current:
        if one.label != Phase.CONTROL and one.policy_version in versions:
            versions[one.policy_version] = replace(versions[one.policy_version], **asdict(one.score))
    return [versions[number] for number in sorted(versions)]


def _version(number: int, round_: int, phase: Phase) -> PolicyVersion:
    return PolicyVersion(
        version=number,
        round=round_,
        phase=phase,
        num_correct=None,
        num_problems=None,
        checkpoint=None,
        weight_store=None,
        manifest_digest=None,
    )
