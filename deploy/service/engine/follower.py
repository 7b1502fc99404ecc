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
from actors.registry.records import DEFAULT_ADMIN_STATE, NEWEST, POLICY, PolicyVersion
from actors.registry.registry import Registry
from actors.registry.state import RegistryState
from deploy.service.contract import FollowerStatus
from deploy.service.engine.versions import NoRoomError, NoSuchVersionError, RefusedVersionError, Versions

_BLOCK_MS = 1000
_RETRY_S = 2.0
_JOIN_TIMEOUT_S = 10.0
_MAX_GIVEN_UP = 20


_Choice = tuple[PolicyVersion, bool]
"""A version, and whether it is pinned or served by other engines: a version that was given up is then tried again."""


class VersionFollower:
    """Follower of the registry: swaps to the version that should be served, and reports what is served."""

    def __init__(self, registry: Registry, versions: Versions, run_dir: Path) -> None:
        """Create a follower, which does nothing until it is started.

        The operator's settings are in `run_dir`, from which an empty registry is filled too.
        """
        self._registry, self._versions, self._run_dir = registry, versions, run_dir
        self._last_id = "0"
        self._newest: PolicyVersion | None = None
        self._standing = RegistryState()
        self._is_filled = self._has_looked = False
        # Versions that cannot be loaded: only other weights, another place or an operator's change helps.
        self._given_up = deque[object](maxlen=_MAX_GIVEN_UP)
        self._status = FollowerStatus(
            registry_reachable=False, num_errors=0, last_error=None, admin=DEFAULT_ADMIN_STATE
        )
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def status(self) -> FollowerStatus:
        """Errors so far, and whether the registry is reachable."""
        return self._status

    def ensure_running(self) -> None:
        """Start the thread, or restart it if it has died."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._thread is not None:
            self._count("the follower's thread had died", registry_reachable=self._status.registry_reachable)
        self._thread = threading.Thread(target=self._run, name="version-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def follow_once(self, block_ms: int) -> bool:
        """Read the registry and serve the right version. Failures are counted; returns False after one."""
        num_errors = self._status.num_errors
        try:
            self._fill()
            self._read(block_ms)
            if self._obey():
                # The state may have changed during loading.
                self._read(0)
            self._tell_serving()
        # Boundary at which failures become data: the service keeps its version, whatever fails.
        except Exception as error:
            is_away = isinstance(error, ConnectionError)
            # The registry may come back empty.
            self._is_filled = self._is_filled and not is_away
            self._count(str(error) or type(error).__name__, registry_reachable=not is_away)
        return self._status.num_errors == num_errors

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self.follow_once(_BLOCK_MS):
                self._stopping.wait(_RETRY_S)

    def _fill(self) -> None:
        """Fill a registry that is new, or has lost its data, from the run directory."""
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
        """Wait for an event, and read the state."""
        self._last_id = self._registry.wait(self._last_id, block_ms)
        before, self._standing = self._standing, self._registry.snapshot()
        self._take_settings()
        standing = self._standing
        if standing.newest is not None and standing.newest != self._newest:
            self._newest = standing.newest
            self._versions.learn(self._newest)
        if NEWEST in before.aliases and NEWEST not in standing.aliases:
            self._is_filled = False
        if standing.admin != before.admin:
            # An operator's change is also a request to try again.
            self._given_up.clear()
        self._status = replace(self._status, registry_reachable=True, admin=standing.admin)
        if not self._has_looked and self._newest is not None:
            self._has_looked = True
            # A new engine does not try what the others have refused.
            if self._newest.version in standing.refused and not self._is_served_elsewhere(self._newest):
                self._given_up.append(_key(self._newest, is_chosen=False))

    def _take_settings(self) -> None:
        """Copy the operator's settings from the run directory to the registry, which emits the events once."""
        try:
            wanted = read_admin(self._run_dir)
            if wanted.changed_at > self._standing.admin.changed_at:
                self._registry.set_admin(wanted)
                self._standing = self._registry.snapshot()
        except (LookupError, ValueError) as error:
            # The file is damaged, or pins an unknown version. Reported once, not every second.
            if str(error) != self._status.last_error:
                self._count(str(error), registry_reachable=True)

    def _obey(self) -> bool:
        """Swap to the first candidate that can be served. Returns whether another version serves now."""
        while (choice := self._choice()) is not None and not choice[0].has_same_weights(self._versions.policy):
            policy, is_chosen = choice
            try:
                self._versions.adopt(policy)
            except (NoSuchVersionError, RefusedVersionError) as error:
                self._count(str(error), registry_reachable=True)
                # Missing weights are no refusal: other engines may reach them, or this one later.
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
        """Return the first candidate that was not given up; None: keep the serving version."""
        return next((choice for choice in self._wanted() if _key(*choice) not in self._given_up), None)

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
            # A resumed run may announce other weights under the number; the serving ones are kept.
            return current
        policy = self._registry.version(number)
        if policy is None:
            raise LookupError(f"policy version {number} should be served, but the registry does not know it")
        return policy

    def _is_served_elsewhere(self, policy: PolicyVersion) -> bool:
        return self._standing.aliases.get(POLICY) == policy.version

    def _tell_serving(self) -> None:
        """Point the alias `policy` to the serving version, unless this engine lags behind."""
        policy, before = self._versions.policy, self._standing.aliases.get(POLICY)
        choice = self._choice()
        is_wanted = before is None if choice is None else choice[0].has_same_weights(policy)
        if is_wanted and before != policy.version:
            # This does nothing if another engine has moved it meanwhile.
            self._registry.serve(policy.version, expected=before)

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
