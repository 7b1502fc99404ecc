"""Follower: a thread that loads the version to serve and swaps it in, apart from the requests.

The first of these versions that can be served is served. The alias `policy` points to the version that the service's
other engines serve.

| operator         | candidates                                                    |
|------------------|---------------------------------------------------------------|
| pinned a version | the pinned one, then that of the alias `policy`               |
| paused           | that of the alias `policy`                                    |
| neither          | the newest announced one, then that of the alias `policy`     |

| outcome                  | consequence                                                                    |
|--------------------------|--------------------------------------------------------------------------------|
| it serves                | the alias moves to it, unless another engine moved it first                    |
| its weights are missing  | this engine gives it up and tries the next candidate                           |
| it is refused            | likewise; the registry records the refusal, unless other engines serve it      |
| no room in memory        | it is tried again one second later; the present version serves on              |
| the registry is away     | counted as an error; the present version serves on. An empty registry is filled |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import structlog

from actors.registry.files import read_admin, rebuild
from actors.registry.records import (
    DEFAULT_ADMIN_STATE,
    NEWEST,
    POLICY,
    MalformedEntryError,
    PolicyVersion,
    RegistrySnapshot,
)
from actors.registry.registry import Registry
from deploy.service.contract import FollowerStatus
from deploy.service.engine.loaded_version import (
    NoRoomError,
    NoSuchVersionError,
    RefusedVersionError,
)
from deploy.service.engine.versions import Versions

_BLOCK_MS = 1000
_RETRY_S = 2.0
_JOIN_TIMEOUT_S = 10.0
_MAX_GIVEN_UP = 20


_Choice = tuple[PolicyVersion, bool]
"""A version, and whether it is pinned or served by other engines: a version that was given up is then tried again."""


class VersionFollower:
    """Reads the registry, swaps to the version that is wanted, and tells the registry what is served."""

    def __init__(self, registry: Registry, versions: Versions, run_dir: Path) -> None:
        """Follow `registry` into `versions`, once it is told to.

        Args:
            registry: of the run.
            versions: those of this engine.
            run_dir: what an empty registry is filled from.
        """
        self._registry, self._versions, self._run_dir = registry, versions, run_dir
        self._last_id = "0"
        self._newest: PolicyVersion | None = None
        self._standing = RegistrySnapshot(aliases={}, admin=DEFAULT_ADMIN_STATE, refused=frozenset())
        self._is_filled = self._has_looked = False
        # Gone or bad for good: only other weights, or another place to load them from, help.
        self._given_up = deque[object](maxlen=_MAX_GIVEN_UP)
        self._status = FollowerStatus(
            registry_reachable=False, num_errors=0, last_error=None, admin=self._standing.admin
        )
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def status(self) -> FollowerStatus:
        """How it fares."""
        return self._status

    def ensure_running(self) -> None:
        """Start the thread, or start it again if it has died."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._thread is not None:
            self._count("the follower's thread had died", registry_reachable=self._status.registry_reachable)
        self._thread = threading.Thread(target=self._run, name="version-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def follow_once(self, block_ms: int) -> bool:
        """Read what is wanted and serve it; what fails is counted. False when something failed."""
        num_errors = self._status.num_errors
        try:
            self._fill()
            self._read(block_ms)
            if self._obey():
                # Loading took its time.
                self._read(0)
            self._tell_serving()
        # The boundary at which failures become data: whatever fails, the service goes on with what it has.
        except Exception as error:
            is_away = isinstance(error, ConnectionError)
            # It may come back empty.
            self._is_filled = self._is_filled and not is_away
            self._count(str(error) or type(error).__name__, registry_reachable=not is_away)
        return self._status.num_errors == num_errors

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self.follow_once(_BLOCK_MS):
                self._stopping.wait(_RETRY_S)

    def _fill(self) -> None:
        """Give a registry that is new, or has lost its data, what the run directory says."""
        if self._is_filled:
            return
        try:
            rebuild(self._registry, self._run_dir, self._newest)
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            self._count(str(error), registry_reachable=True)
        self._is_filled = True

    def _read(self, block_ms: int) -> None:
        try:
            entries = self._registry.follow(self._last_id, block_ms)
        except MalformedEntryError as error:
            self._last_id = error.entry_id
            raise
        for entry_id, policy in entries:
            self._last_id, self._newest = entry_id, policy
            self._versions.learn(policy)
        before, self._standing = self._standing, self._registry.snapshot()
        if NEWEST in before.aliases and NEWEST not in self._standing.aliases:
            self._is_filled = False
        self._take_settings()
        if before.admin != self._standing.admin:
            # An operator's change is also a request to try again.
            self._given_up.clear()
        self._status = replace(self._status, registry_reachable=True, admin=self._standing.admin)
        if not self._has_looked and self._newest is not None:
            self._has_looked = True
            # A new engine does not try what the others have refused.
            if self._newest.version in self._standing.refused and not self._is_served_elsewhere(self._newest):
                self._given_up.append(_key(self._newest, is_chosen=False))

    def _take_settings(self) -> None:
        """Copy the operator's settings from the run directory to the registry, which emits the events once."""
        try:
            wanted = read_admin(self._run_dir)
        except ValueError as error:
            # Reported once, not every second.
            if str(error) != self._status.last_error:
                self._count(str(error), registry_reachable=True)
            return
        if wanted != self._standing.admin:
            self._registry.set_admin(wanted)
            self._standing = replace(self._standing, admin=wanted)

    def _obey(self) -> bool:
        """Let the version that is wanted take over. Whether another serves now."""
        while (choice := self._choice()) is not None and not self._serves(*choice):
            policy, is_chosen = choice
            try:
                self._versions.adopt(policy)
            except (NoSuchVersionError, RefusedVersionError) as error:
                self._count(str(error), registry_reachable=True)
                # What is out of reach of this engine may be in reach of others, or of this one later.
                if isinstance(error, RefusedVersionError) and not self._is_served_elsewhere(policy):
                    self._registry.refuse(policy.version, str(error), policy.manifest_digest)
                self._given_up.append(_key(policy, is_chosen))
            except NoRoomError:
                structlog.get_logger().info("swap_waits", policy_version=policy.version)
                return False
            else:
                return True
        return False

    def _choice(self) -> _Choice | None:
        """The first of what is wanted that can be served; None: what serves now."""
        for policy, is_chosen in self._wanted():
            if _key(policy, is_chosen) not in self._given_up:
                return policy, is_chosen
        return None

    def _wanted(self) -> Iterator[_Choice]:
        admin, served = self._standing.admin, self._standing.aliases.get(POLICY)
        if admin.pinned is not None:
            yield self._version(admin.pinned), True
        elif not admin.is_paused and self._newest is not None:
            yield self._newest, self._is_served_elsewhere(self._newest)
        if served is not None:
            yield self._version(served), True

    def _version(self, number: int) -> PolicyVersion:
        current = self._versions.policy
        if current.version == number:
            # A resumed run may announce other weights under the number: what is held is what serves.
            return current
        policy = self._registry.version(number)
        if policy is None:
            raise LookupError(f"policy version {number} is wanted, and the registry does not know it")
        return policy

    def _is_served_elsewhere(self, policy: PolicyVersion) -> bool:
        return self._standing.aliases.get(POLICY) == policy.version

    def _serves(self, policy: PolicyVersion, _is_chosen: bool) -> bool:
        return policy.has_same_weights(self._versions.policy)

    def _tell_serving(self) -> None:
        """Point the alias to what serves, if that is what is wanted: an engine that lags says nothing."""
        policy, before = self._versions.policy, self._standing.aliases.get(POLICY)
        choice = self._choice()
        is_wanted = before is None if choice is None else self._serves(*choice)
        if is_wanted and before != policy.version:
            # Where it has moved meanwhile another engine was faster.
            self._registry.move(POLICY, policy.version, expected=before)

    def _count(self, message: str, *, registry_reachable: bool) -> None:
        structlog.get_logger().warning("follower_error", error=message)
        self._status = replace(
            self._status,
            registry_reachable=registry_reachable,
            num_errors=self._status.num_errors + 1,
            last_error=message,
        )


def _key(policy: PolicyVersion, is_chosen: bool) -> object:
    return is_chosen, policy.version, policy.manifest_digest, policy.checkpoint, policy.weight_store
