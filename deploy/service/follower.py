"""The follower: a thread that lets each announced policy version take over, off the path of requests."""

from __future__ import annotations

import threading

import structlog

from actors.registry import MalformedEntryError, PolicyVersion, Registry
from deploy.service.messages import FollowerStatus
from deploy.service.versions import NoRoomError, NoSuchVersionError, RefusedVersionError, Versions

_BLOCK_MS = 1000
_RETRY_S = 2.0
_JOIN_TIMEOUT_S = 10.0


class VersionFollower:
    """Reads the registry and swaps to the version announced last."""

    def __init__(self, registry: Registry, versions: Versions) -> None:
        """Follow `registry` into `versions`, once it is told to."""
        self._registry, self._versions = registry, versions
        self._last_id = "0"
        self._target: PolicyVersion | None = None
        self._status = FollowerStatus(registry_reachable=False, num_errors=0, last_error=None)
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
        """Read what was announced and serve the last of it; what fails is counted. False when something failed."""
        try:
            self._read(block_ms)
            self._adopt()
        # The boundary at which failures become data: whatever fails, the service goes on with what it has.
        except Exception as error:
            self._count(str(error) or type(error).__name__, registry_reachable=not isinstance(error, ConnectionError))
            return False
        return True

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self.follow_once(_BLOCK_MS):
                self._stopping.wait(_RETRY_S)

    def _read(self, block_ms: int) -> None:
        try:
            entries = self._registry.follow(self._last_id, block_ms)
        except MalformedEntryError as error:
            self._last_id = error.entry_id
            raise
        self._set_reachable()
        for entry_id, policy in entries:
            self._last_id, self._target = entry_id, policy
            self._versions.learn(policy)

    def _adopt(self) -> None:
        target = self._target
        if target is None or target.has_same_weights(self._versions.policy):
            return
        try:
            self._versions.adopt(target)
        except (NoSuchVersionError, RefusedVersionError):
            # Gone or bad for good: only a newer announcement helps. Other failures are tried again.
            self._target = None
            raise
        except NoRoomError:
            structlog.get_logger().info("swap_waits", policy_version=target.version)

    def _set_reachable(self) -> None:
        status = self._status
        self._status = FollowerStatus(
            registry_reachable=True, num_errors=status.num_errors, last_error=status.last_error
        )

    def _count(self, message: str, *, registry_reachable: bool) -> None:
        structlog.get_logger().warning("follower_error", error=message)
        self._status = FollowerStatus(
            registry_reachable=registry_reachable, num_errors=self._status.num_errors + 1, last_error=message
        )
