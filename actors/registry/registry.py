"""Policy registry on Redis: a run's versions, the aliases that point to them, and their events.

A run has two keys: a hash with the current state (`actors/registry/state.py`), and a stream with the events, which a
disconnected reader continues where it stopped. All writes go through `Registry._change`, one optimistic transaction on
both. The registry is never the only copy of anything: weights are in the weight store and in checkpoints, and the rest
is in the run directory, from which `actors/registry/files.py` rebuilds it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from actors.registry.records import (
    BASE,
    BEST,
    NEWEST,
    POLICY,
    AdminState,
    EventKind,
    MalformedEntryError,
    PolicyVersion,
    RegistryEvent,
)
from actors.registry.state import RegistryState, decoded, version_field

URL_VARIABLE = "D1_REDIS_URL"
URL_ADVICE = f"{URL_VARIABLE} should be redis://[:PASSWORD@]HOST:PORT of a server that runs, or unset"
_ENTRY_ID = re.compile(r"\d{1,20}(-\d{1,20})?")
_FIELD = "json"
_MAX_EVENTS = 10_000
_MAX_READ = 1000
_MAX_BLOCK_MS = 2000
# Longer than a blocking read, or redis-py ends the read as a timeout.
_SOCKET_TIMEOUT_S = 3.0
# Phases of the policies that the rounds may start from: the last of these is `base`. Names of `actors.spec.Phase`,
# which imports more than a reader of the registry needs.
_BASE_PHASES = ("untrained", "sft")
_Result = TypeVar("_Result")


class Registry:
    """Client of one run's registry. Every call ends within seconds; ConnectionError gives the reason in a sentence."""

    def __init__(self, url: str, run: str) -> None:
        """Create a client, which connects at the first call; `url` is `redis://[:password@]host:port`."""
        parts = urlsplit(url)
        # Without the password, because error messages show it.
        self._address = f"{parts.hostname}:{parts.port}"
        self._state, self._events = f"d1:{run}:state", f"d1:{run}:events"
        # RESP 2: replies have the same form on every server.
        self._redis: Any = redis.Redis.from_url(
            url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            # Enough for a connection that broke while idle; by default redis-py sleeps for seconds.
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), retries=2),
            protocol=2,
            decode_responses=True,
            # An entry that is not UTF-8 is malformed JSON.
            encoding_errors="replace",
        )

    def ping(self) -> None:
        """Raise ConnectionError, with a sentence, unless the registry answers."""
        with self._explained():
            self._redis.ping()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    # Reading.

    def version(self, number: int) -> PolicyVersion | None:
        """Return what is known of a version; None if nothing is."""
        with self._explained():
            return decoded(self._redis.hget(self._state, version_field(number)))

    def snapshot(self) -> RegistryState:
        """Return the current state, of the versions only the newest."""
        with self._explained():
            state = RegistryState(partial(self._redis.hmget, self._state))
            if (newest := state.aliases.get(NEWEST)) is not None:
                state.load([newest])
        return state

    def events(self, last_id: str) -> list[RegistryEvent]:
        """Return the events after entry `last_id` ("0": from the first that is kept), oldest first.

        Raises MalformedEntryError if the very next entry is unreadable; readable entries before such a one are returned
        first. Raises ValueError if `last_id` is not an entry id.
        """
        events: list[RegistryEvent] = []
        for entry in self._entries(last_id, None):
            try:
                events.append(_event(entry))
            except MalformedEntryError:
                if not events:
                    raise
                break
        return events

    def last_events(self, count: int) -> list[RegistryEvent]:
        """Return the last `count` events, oldest first. Raises MalformedEntryError."""
        with self._explained():
            entries = self._redis.xrevrange(self._events, count=count)
        return [_event(entry) for entry in reversed(entries)]

    def wait(self, last_id: str, block_ms: int) -> str:
        """Wait for an event after entry `last_id`, up to `block_ms` (1 to 2000; 0 does not wait). Returns the id of the
        last one read, or `last_id`."""
        entries = self._entries(last_id, min(block_ms, _MAX_BLOCK_MS) or None)
        return str(entries[-1][0]) if entries else last_id

    # Writing.

    def announce(self, policy: PolicyVersion, began_at: float | None = None) -> bool:
        """Make `policy` the newest version.

        If it was announced before with the same weights, only its new metadata is added. Fields that it lacks keep
        their known values: a resumed run does not know the score.

        Args:
            policy: the version.
            began_at: when its run began (unix time). Data of a run of the same name that began earlier is deleted.
                None: unknown, nothing is deleted.

        Returns:
            False if the registry had no version of the run before: it is new, or has lost its data.
        """

        def change(state: RegistryState) -> bool:
            state.begin(began_at)
            known = state.version(policy.version)
            if known is not None and known.has_same_weights(policy):
                state.put(policy.filled_from(known))
            else:
                state.put(policy)
                # Other weights than those that were refused under this number.
                state.set_refused(policy.version, False)
                state.emit(EventKind.PUBLISHED, policy.version)
            if policy.phase in _BASE_PHASES:
                state.move(BASE, policy.version)
            return state.move(NEWEST, policy.version) is not None

        return self._change(change)

    def score(self, version: int, num_correct: int, num_problems: int) -> bool:
        """Record a version's score. Returns False if the version is unknown."""
        return self._update(version, num_correct=num_correct, num_problems=num_problems)

    def add_checkpoint(self, version: int, directory: str) -> bool:
        """Record a version's checkpoint directory. Returns False if the version is unknown.

        A service on another cluster cannot reach the weight store, and can load the version from then on. A refusal of
        the version is lifted, because the checkpoint may be intact.
        """
        return self._update(version, checkpoint=directory)

    def serve(self, version: int, *, expected: int | None) -> bool:
        """Point `policy` to a version if it now points to `expected` (None: to nothing); returns whether it did.

        Emits `serving` and `retired`. Raises LookupError if the version is unknown.
        """

        def change(state: RegistryState) -> bool:
            if state.version(version) is None:
                raise LookupError(f"policy version {version} is not known, so it cannot be served")
            if state.aliases.get(POLICY) != expected:
                return False
            if state.move(POLICY, version) != version:
                state.emit(EventKind.SERVING, version)
                if expected is not None:
                    state.emit(EventKind.RETIRED, expected)
            return True

        return self._change(change)

    def choose_best(self, version: int) -> bool:
        """Point `best` to a version, and emit `moved`. Returns False if it is unknown. Only the run's coordinator calls
        it."""

        def change(state: RegistryState) -> bool:
            if state.version(version) is None:
                return False
            if state.move(BEST, version) != version:
                state.emit(EventKind.MOVED, version)
            return True

        return self._change(change)

    def refuse(self, version: int, why: str, digest: str | None = None) -> bool:
        """Record that the service does not serve a version, with the digest of its weights if known.

        Returns False if it was refused before, or if other weights have been announced under the number since.
        """

        def change(state: RegistryState) -> bool:
            known = state.version(version)
            if known is not None and not known.has_same_weights(replace(known, manifest_digest=digest)):
                return False
            is_new = state.set_refused(version, True)
            if is_new:
                state.emit(EventKind.REFUSED, version, why)
            return is_new

        return self._change(change)

    def set_admin(self, admin: AdminState) -> None:
        """Record an operator's settings unless newer ones are known, and emit an event for each change.

        Raises LookupError if the pinned version is unknown.
        """

        def change(state: RegistryState) -> None:
            before = state.admin
            if admin.changed_at <= before.changed_at:
                # Its reader has an outdated copy of the file.
                return
            if admin.pinned is not None and state.version(admin.pinned) is None:
                raise LookupError(f"policy version {admin.pinned} is not known, so it cannot be pinned")
            state.set_admin(admin)
            if admin.pinned is not None and admin.pinned != before.pinned:
                state.emit(EventKind.PINNED, admin.pinned, admin.why)
            elif admin.pinned is None and before.pinned is not None:
                state.emit(EventKind.UNPINNED, before.pinned, admin.why)
            if admin.is_paused != before.is_paused:
                state.emit(EventKind.PAUSED if admin.is_paused else EventKind.RESUMED, None, admin.why)

        self._change(change)

    def restore(
        self,
        versions: Sequence[PolicyVersion],
        newest: int | None = None,
        began_at: float | None = None,
        best: int | None = None,
    ) -> int:
        """Add absent versions, fill in missing fields of others, and set the newest one if there is none.

        Existing data stays, unless it is of a run that began before `began_at`, as in `announce`. The newest version is
        `newest`, or else the newest of `versions` with a checkpoint. The alias `best` moves to `best`. Both must be
        among `versions`.

        Returns how many versions were absent; 0 if there was nothing to do.
        """
        base = max((policy.version for policy in versions if policy.phase in _BASE_PHASES), default=None)
        last = newest
        if last is None:
            last = max((policy.version for policy in versions if policy.checkpoint is not None), default=None)

        def change(state: RegistryState) -> int:
            state.begin(began_at)
            state.load([policy.version for policy in versions])
            num_added = 0
            for policy in versions:
                known = state.version(policy.version)
                num_added += known is None
                state.put(policy if known is None else known.filled_from(policy))
            if base is not None and BASE not in state.aliases:
                state.move(BASE, base)
            if best is not None and state.move(BEST, best) not in (best, None):
                state.emit(EventKind.MOVED, best)
            if last is not None and NEWEST not in state.aliases:
                state.move(NEWEST, last)
            if num_added:
                state.emit(EventKind.REBUILT, last, f"{num_added} versions from the run directory")
            return num_added

        return self._change(change)

    def _update(self, version: int, **news: Any) -> bool:
        def change(state: RegistryState) -> bool:
            known = state.version(version)
            if known is None:
                return False
            state.put(replace(known, **news))
            if news.get("checkpoint", known.checkpoint) != known.checkpoint:
                # The weights were refused as they came from elsewhere.
                state.set_refused(version, False)
            return True

        return self._change(change)

    def _change(self, change: Callable[[RegistryState], _Result]) -> _Result:
        """Change the state and append the events in one transaction: a change that another client has overtaken is
        computed again."""

        def attempt(pipe: Any) -> _Result:
            state = RegistryState(partial(pipe.hmget, self._state))
            result = change(state)
            pipe.multi()
            if state.is_of_new_run:
                pipe.delete(self._state)
                # Not deleted: ids go on rising, so that readers continue.
                pipe.xtrim(self._events, maxlen=0)
            if state.changed:
                pipe.hset(self._state, mapping=state.changed)
            for event in state.events:
                pipe.xadd(self._events, {_FIELD: event}, maxlen=_MAX_EVENTS)
            return result

        with self._explained():
            found: _Result = self._redis.transaction(attempt, self._state, value_from_callable=True)
            return found

    def _entries(self, last_id: str, block_ms: int | None) -> list[tuple[str, dict[str, str]]]:
        if not _ENTRY_ID.fullmatch(last_id):
            raise ValueError(f"{last_id[:64]!r} is no id of an entry: those are two numbers, 1700000000000-0")
        with self._explained():
            reply: Any = self._redis.xread({self._events: last_id}, count=_MAX_READ, block=block_ms)
        return list(reply[0][1]) if reply else []

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except redis.AuthenticationError as error:
            raise ConnectionError(f"the registry at {self._address} refused the password") from error
        except redis.RedisError as error:
            raise ConnectionError(f"the registry at {self._address} cannot be used: {error}") from error


def _event(entry: tuple[str, dict[str, str]]) -> RegistryEvent:
    name, fields = entry
    try:
        return RegistryEvent.from_json(name, fields.get(_FIELD, "null"))
    except ValueError as error:
        raise MalformedEntryError(name, str(error)) from error


def check_registry(num_machines: int) -> None:
    """Raise ValueError or ConnectionError, with the reason in a sentence, if `num_machines` cannot share a registry."""
    url = os.environ.get(URL_VARIABLE)
    if url:
        try:
            registry = Registry(url, "none")
        except ValueError as error:
            # Its message quotes a part of the URL, which may be the password.
            raise ValueError(f"{URL_VARIABLE} is no address of a Redis; {URL_ADVICE}") from error
        try:
            registry.ping()
        except ConnectionError as error:
            raise ConnectionError(f"{str(error).rstrip('.')}; {URL_ADVICE}") from error
        finally:
            registry.close()
    elif num_machines > 1:
        raise ValueError(
            f"the cluster has {num_machines} machines and the embedded registry serves one: "
            f"set {URL_VARIABLE} to a Redis that all of them reach"
        )
