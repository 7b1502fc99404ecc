"""What an operator does to a run's service: pin a version, roll back, pause. It knows no HTTP and no Ray.

What is wanted is in the registry, which every engine follows, and in the run directory, from which an empty registry is
filled. What holds the service is written to the registry first, what lets it go to the file first: whoever fills the
registry in between takes nothing back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from actors.checkpoints.selection import read_position
from actors.registry.files import write_admin
from actors.registry.records import POLICY, AdminState, EventKind, MalformedEntryError, PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import CHECKPOINTS
from deploy.service.contract import EngineState
from learner.model.checkpoint_files import max_float32_bytes
from learner.parallel.timeouts import transfer_timeout_s

PREPARE_TIMEOUT_S = 60.0
"""Time to load a version on every engine, in seconds, beside what its bytes take."""
_SERVE_TIMEOUT_S = 30.0
_POLL_S = 0.2


class Engines(Protocol):
    """The engines, asked from any thread. Every call ends."""

    def states(self) -> list[EngineState]:
        """Every engine that answers, as it says of itself."""
        ...

    def prepare(self, policy: PolicyVersion, timeout_s: float) -> list[str]:
        """Let every engine load a version. A sentence for each that cannot. Raises TimeoutError."""
        ...

    def stored(self, store: str) -> frozenset[int]:
        """The versions in the weight store of that name; none where it does not answer."""
        ...


class SteeringError(Exception):
    """What the operator asked for cannot be done; nothing has changed. In one sentence."""


class UnknownVersionError(SteeringError):
    """The registry knows no such version."""


class UnreadyError(SteeringError):
    """It could not be done now; it may be done later."""


class Steering:
    """One run's service. One thread at a time may change something."""

    def __init__(self, registry: Registry, run_dir: Path, engines: Engines) -> None:
        """Steer the `engines` that follow `registry`."""
        self.registry, self._run_dir, self.engines = registry, run_dir, engines

    def pin(self, version: int, why: str) -> dict[str, int]:
        """Hold the service on a version, and wait until it serves that. Returns what `served_by` does.

        Raises:
            UnknownVersionError: the registry knows no such version.
            SteeringError: an engine cannot serve it.
            UnreadyError: not every engine took it in time.
            ConnectionError: the registry is away.
        """
        policy = self.registry.version(version)
        if policy is None:
            raise UnknownVersionError(f"The registry knows no policy version {version}.")
        self._prepare(policy)
        before = self.registry.admin()
        try:
            self.registry.pin(version, why)
        except LookupError as error:
            # It has lost its data since it was asked.
            raise UnknownVersionError(f"The registry knows no policy version {version} any more.") from error
        try:
            self._keep(replace(before, pinned=version))
            return self._wait_for(version)
        except SteeringError as error:
            self._put_back(before, str(error))
            raise

    def unpin(self, why: str) -> None:
        """Hold it on no version any more. Raises ConnectionError, SteeringError."""
        before = self.registry.admin()
        self._keep(replace(before, pinned=None))
        self._or_keep(before, lambda: self.registry.pin(None, why))

    def roll_back(self, why: str) -> tuple[int, dict[str, int]]:
        """Pin what served before the present version first took over. Returns it, and what each engine serves.

        Called again, it goes further back. Raises as `pin` does; SteeringError where nothing served before.
        """
        version = before_the_present(self._serving_events(), self.registry.aliases().get(POLICY))
        if version is None:
            raise SteeringError("The registry remembers no policy version that served before this one.")
        return version, self.pin(version, why)

    def loadable(self, policies: Sequence[PolicyVersion]) -> frozenset[int]:
        """Those of some versions that an engine could load, or has: their large files are not looked at."""
        live = {one.version for state in self.engines.states() for one in state.live}
        stores = {policy.weight_store for policy in policies if policy.weight_store is not None}
        stored = {(store, version) for store in stores for version in self.engines.stored(store)}
        return frozenset(
            policy.version
            for policy in policies
            if policy.version in live
            or (policy.weight_store, policy.version) in stored
            or (policy.checkpoint is not None and _is_checkpoint(Path(policy.checkpoint)))
        )

    def pause(self, why: str) -> None:
        """Let the service keep what it has. Raises ConnectionError, SteeringError."""
        before = self.registry.admin()
        self.registry.pause(True, why)
        try:
            self._keep(replace(before, is_paused=True))
        except SteeringError as error:
            self._put_back(before, str(error))
            raise

    def resume(self, why: str) -> None:
        """No longer. Raises ConnectionError, SteeringError."""
        before = self.registry.admin()
        self._keep(replace(before, is_paused=False))
        self._or_keep(before, lambda: self.registry.pause(False, why))

    def _prepare(self, policy: PolicyVersion) -> None:
        """Let the engines load it before anything changes."""
        within_s = transfer_timeout_s(PREPARE_TIMEOUT_S, max_float32_bytes(self._run_dir / CHECKPOINTS / "initial"))
        try:
            refusals = self.engines.prepare(policy, within_s)
        except TimeoutError as error:
            raise UnreadyError(
                f"Not every engine loaded policy version {policy.version} within {within_s:.0f} s."
            ) from error
        if refusals:
            why = refusals[0].removeprefix(f"Policy version {policy.version} is not served: ").removesuffix(".")
            raise SteeringError(f"Policy version {policy.version} cannot be pinned: {why}.")

    def _wait_for(self, version: int) -> dict[str, int]:
        deadline = time.monotonic() + _SERVE_TIMEOUT_S
        while True:
            served = served_by(self.engines.states())
            if served and set(served.values()) == {version}:
                return served
            if time.monotonic() > deadline:
                others = ", ".join(f"one serves {other}" for other in served.values() if other != version)
                raise UnreadyError(
                    f"Not every engine served policy version {version} within {_SERVE_TIMEOUT_S:.0f} s: "
                    f"{others or 'none answers'}."
                )
            time.sleep(_POLL_S)

    def _keep(self, state: AdminState) -> None:
        try:
            write_admin(self._run_dir, state)
        except OSError as error:
            raise UnreadyError(f"What is wanted cannot be written to the run directory: {error.strerror}.") from error

    def _or_keep(self, before: AdminState, change: Callable[[], None]) -> None:
        """Change the registry, or keep what was."""
        try:
            change()
        except ConnectionError:
            self._keep(before)
            raise

    def _put_back(self, before: AdminState, why: str) -> None:
        self.registry.pin(before.pinned, why)
        self.registry.pause(before.is_paused, why)
        self._keep(before)

    def _serving_events(self) -> list[int]:
        """The versions that came to serve, in order, as far as the registry remembers."""
        served, last_id = list[int](), "0"
        while True:
            try:
                events = self.registry.events(last_id, 0)
            except MalformedEntryError as error:
                last_id = error.entry_id
                continue
            if not events:
                return served
            last_id = events[-1].id
            served += [one.version for one in events if one.kind is EventKind.SERVING and one.version is not None]


def served_by(states: Sequence[EngineState]) -> dict[str, int]:
    """The policy version that each engine serves, by its replica's id."""
    return {state.replica: state.policy.version for state in states}


def before_the_present(served: Iterable[int], present: int | None) -> int | None:
    """The version that served before `present` first did; None where there is none.

    Before it first did, and not before it last did: rolling back twice would else come to what was rolled back.
    """
    before = None
    for version in served:
        if version == present:
            return before
        before = version
    return None


def _is_checkpoint(directory: Path) -> bool:
    try:
        read_position(directory)
    except ValueError:
        return False
    return True
