"""Rebuild the registry from the run directory, if it is new or Redis has lost its data."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, replace
from pathlib import Path

from actors.checkpoints.best import current_evaluations, validated_best
from actors.checkpoints.selection import servable_checkpoints
from actors.registry.records import DEFAULT_ADMIN_STATE, AdminState, PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import CHECKPOINTS, Event, began_at, read_events
from actors.spec import Phase

ADMIN = "admin.json"


def rebuild(registry: Registry, run_dir: Path, newest: PolicyVersion | None = None) -> int:
    """Fill in what the registry lacks of a run. Existing data stays, and a second call does nothing.

    Checkpoints are not verified here, but on loading. `newest` is the version that the caller knows to be the newest:
    without it, a registry that has lost its data would go back to the newest checkpoint.

    Returns how many versions were absent. Raises ConnectionError as the registry does.
    """
    events = read_events(run_dir)
    versions, newest_number = history_of(run_dir, events), None
    if newest is not None:
        known = {policy.version: policy for policy in versions}
        known[newest.version] = newest.with_checkpoint_of(known.get(newest.version))
        versions, newest_number = list(known.values()), newest.version
    return registry.restore(versions, newest_number, began_at(events), validated_best(events))


def history_of(run_dir: Path, events: list[Event]) -> list[PolicyVersion]:
    """Return the versions that a service may use, oldest first, with their scores and checkpoints."""
    versions = _from_rounds(events)
    for position, directory in servable_checkpoints(run_dir / CHECKPOINTS):
        known = versions.get(position.policy_version) or _version(
            position.policy_version, position.round, position.phase
        )
        versions[position.policy_version] = replace(
            known, checkpoint=str(directory.resolve()), manifest_digest=position.manifest_digest
        )
    scores = {
        event["policy_version"]: {name: event[name] for name in ("num_correct", "num_problems")}
        for event in current_evaluations(events)
        if event["label"] != Phase.CONTROL
    }
    return [replace(versions[number], **scores.get(number, {})) for number in sorted(versions)]


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


def _from_rounds(events: list[Event]) -> dict[int, PolicyVersion]:
    versions: dict[int, PolicyVersion] = {}
    for event in events:
        if event["event"] == "round":
            number = event["policy_version"]
            # A resumed run repeats the rounds after its checkpoint, so later versions are discarded.
            versions = {other: policy for other, policy in versions.items() if other < number}
            # An event counts rounds from 0; a version's round is the number of rounds trained.
            versions[number] = _version(number, event["round"] + 1, Phase.RL)
    return versions


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
