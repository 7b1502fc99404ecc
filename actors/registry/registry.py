"""Policy registry on Redis: a run's versions, the aliases that point to them, and their events.

Announcements and events are streams, not pub/sub: a reader that was disconnected continues where it stopped and misses
nothing. Each change is one atomic script (`actors/registry/scripts.py`). The registry is never the only copy of
anything: weights are in the weight store and in checkpoints, the rest is in the run directory, from which
`actors/registry/files.py` rebuilds it. Its records are in `actors/registry/records.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from actors.registry import scripts
from actors.registry.records import (
    BASE,
    BEST,
    NEWEST,
    PINNED,
    AdminState,
    MalformedEntryError,
    PolicyVersion,
    RegistryEvent,
    RegistrySnapshot,
)

URL_VARIABLE = "D1_REDIS_URL"
URL_ADVICE = f"{URL_VARIABLE} should be redis://[:PASSWORD@]HOST:PORT of a server that runs, or unset"
# Aliases that `move` must not change: each has its own method.
_KEPT = frozenset({NEWEST, BASE, BEST, PINNED})
_ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_ENTRY_ID = re.compile(r"\d{1,20}(-\d{1,20})?")
_MAX_READ = 1000
_MAX_WHY = 500
_MAX_BLOCK_MS = 2000
# Longer than a blocking read, or redis-py ends the read as a timeout.
_SOCKET_TIMEOUT_S = 3.0
# Phases of the policies that the rounds may start from: the last of these is `base`. Names of `actors.spec.Phase`,
# which imports more than a reader of the registry needs.
_BASE_PHASES = ("untrained", "sft")
_Entry = TypeVar("_Entry")


class Registry:
    """Client of one run's registry. Every call ends within seconds; ConnectionError gives the reason in a sentence."""

    def __init__(self, url: str, run: str) -> None:
        """Create a client, which connects at the first call; `url` is `redis://[:password@]host:port`."""
        parts = urlsplit(url)
        # Without the password, because error messages show it.
        self._address = f"{parts.hostname}:{parts.port}"
        self._keys = [f"d1:{run}:{name}" for name in scripts.KEYS]
        self._facts, self._stream, self._aliases, self._paused, self._events, self._refused, _ = self._keys
        # RESP 2: replies have the same form on every server.
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            # Enough for a connection that broke while idle; by default redis-py sleeps for seconds.
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), retries=2),
            protocol=2,
        )
        self._scripts = {text: self._redis.register_script(text) for text in scripts.ALL}

    def ping(self) -> None:
        """Raise ConnectionError, with a sentence, unless the registry answers."""
        with self._explained():
            self._redis.ping()

    # Versions.

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
        digest, is_base = policy.manifest_digest or "", int(policy.phase in _BASE_PHASES)
        return bool(self._run(scripts.ANNOUNCE, _time(began_at), policy.version, policy.to_json(), digest, is_base))

    def score(self, version: int, num_correct: int, num_problems: int) -> bool:
        """Record a version's score, and announce the version again if it is the newest.

        Returns whether it was announced. An older version is not: that would put its weights back into service.
        """
        return self._update(version, num_correct=num_correct, num_problems=num_problems)

    def add_checkpoint(self, version: int, directory: str) -> bool:
        """Record a version's checkpoint directory, and announce the version if it is the newest, as `score` does.

        A service on another cluster cannot reach the weight store, and can load the version from then on. A refusal of
        the version is lifted, because the checkpoint may be intact.
        """
        return self._update(version, checkpoint=directory)

    def version(self, number: int) -> PolicyVersion | None:
        """Return what is known of a version; None if nothing is."""
        with self._explained():
            text: Any = self._redis.hget(self._facts, str(number))
        return None if text is None else PolicyVersion.from_json(text)

    def versions(self) -> list[PolicyVersion]:
        """Return all known versions, oldest first."""
        with self._explained():
            texts: Any = self._redis.hvals(self._facts)
        return sorted((PolicyVersion.from_json(text) for text in texts), key=lambda policy: policy.version)

    def follow(self, last_id: str, block_ms: int) -> list[tuple[str, PolicyVersion]]:
        """Return the announcements after entry `last_id` ("0": from the first that is kept), oldest first.

        Waits up to `block_ms` for one (at most 2000; 0 does not wait). Raises MalformedEntryError if the very next
        entry is unreadable; readable entries before such a one are returned first. Raises ValueError if `last_id` is
        not an entry id.
        """
        return self._read(self._stream, last_id, block_ms, lambda name, text: (name, PolicyVersion.from_json(text)))

    # Aliases.

    def aliases(self) -> dict[str, int]:
        """Return the version of each alias."""
        return dict(self.snapshot().aliases)

    def move(self, alias: str, to: int, *, expected: int | None, why: str = "") -> bool:
        """Point `alias` to version `to` if it now points to `expected` (None: to nothing); returns whether it did.

        A move of `policy` emits the events `serving` and `retired`, one of another alias `moved`.

        Raises:
            LookupError: version `to` is unknown.
            ValueError: `alias` is not a valid name, or only its own method may move it.
        """
        if alias in _KEPT or not _ALIAS.fullmatch(alias):
            raise ValueError(f"{alias[:64]!r} is no alias that can be moved: take a name of a-z, 0-9, _ and -")
        moved = self._run(scripts.MOVE, alias, to, "" if expected is None else expected, why[:_MAX_WHY])
        if moved < 0:
            raise LookupError(f"policy version {to} is not known, so {alias} cannot point to it")
        return bool(moved)

    def choose_best(self, version: int) -> bool:
        """Point `best` to a version, and emit `moved`. Returns False if it is unknown. Only the run's coordinator calls
        it."""
        now = self.aliases().get(BEST, "")
        return self._run(scripts.MOVE, BEST, version, now, "") > 0

    # Operator settings.

    def admin(self) -> AdminState:
        """Return the pinned version, and whether the service is paused."""
        return self.snapshot().admin

    def snapshot(self) -> RegistrySnapshot:
        """Return a consistent snapshot of aliases, operator settings and refused versions."""
        with self._explained(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._aliases)
            pipe.exists(self._paused)
            pipe.smembers(self._refused)
            pairs, paused, refused = pipe.execute()
        aliases = {name.decode(): int(version) for name, version in pairs.items()}
        admin = AdminState(pinned=aliases.get(PINNED), is_paused=bool(paused))
        return RegistrySnapshot(aliases=aliases, admin=admin, refused=frozenset(map(int, refused)))

    def pin(self, version: int | None, why: str = "") -> None:
        """Pin the service to a version; None unpins it. Raises LookupError if the version is unknown."""
        if self._run(scripts.PIN, "" if version is None else version, why[:_MAX_WHY]) < 0:
            raise LookupError(f"policy version {version} is not known, so it cannot be pinned")

    def pause(self, is_paused: bool, why: str = "") -> None:
        """Pause the service's updates to newer versions, or resume them."""
        self._run(scripts.PAUSE, int(is_paused), why[:_MAX_WHY])

    def set_admin(self, state: AdminState) -> None:
        """Record an operator's settings, and emit an event for each change. Raises LookupError as `pin`."""
        self.pin(state.pinned, state.why)
        self.pause(state.is_paused, state.why)

    # Events.

    def refuse(self, version: int, why: str, digest: str | None = None) -> bool:
        """Record that the service does not serve a version, with the digest of its weights if known.

        Returns False if it was refused before, or if other weights have been announced under the number since.
        """
        return bool(self._run(scripts.REFUSE, version, why[:_MAX_WHY], digest or ""))

    def events(self, last_id: str, block_ms: int) -> list[RegistryEvent]:
        """Return the events after entry `last_id`, oldest first; waits and raises as `follow` does."""
        return self._read(self._events, last_id, block_ms, RegistryEvent.from_json)

    def last_events(self, count: int) -> list[RegistryEvent]:
        """Return the last `count` events, oldest first. Raises MalformedEntryError."""
        with self._explained():
            entries: Any = self._redis.xrevrange(self._events, count=count)
        return [_parse(entry, RegistryEvent.from_json) for entry in reversed(entries)]

    # Rebuilding.

    def restore(
        self,
        versions: Sequence[PolicyVersion],
        newest: int | None = None,
        began_at: float | None = None,
        best: int | None = None,
    ) -> int:
        """Add absent versions, fill in missing fields of others, and announce one version if none was announced.

        Existing data stays, unless it is of a run that began before `began_at`, as in `announce`. The announced version
        is `newest`, or else the newest of `versions` with a checkpoint. The alias `best` moves to `best`. Both must be
        among `versions`. The current newest version is announced again if fields of it were filled in.

        Returns how many versions were absent; 0 if there was nothing to do.
        """
        with_checkpoint = (policy.version for policy in versions if policy.checkpoint is not None)
        last = newest if newest is not None else max(with_checkpoint, default="")
        base = max((policy.version for policy in versions if policy.phase in _BASE_PHASES), default="")
        facts = [fact for policy in versions for fact in (policy.version, policy.to_json())]
        found = "" if best is None else best
        return self._run(scripts.RESTORE, _time(began_at), last, base, found, *facts)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _update(self, version: int, **news: str | int) -> bool:
        return bool(self._run(scripts.UPDATE, version, json.dumps(news)))

    def _run(self, script: str, *values: str | int) -> int:
        with self._explained():
            return int(self._scripts[script](keys=self._keys, args=list(values)))

    def _read(self, stream: str, last_id: str, block_ms: int, parse: Callable[[str, bytes], _Entry]) -> list[_Entry]:
        if not _ENTRY_ID.fullmatch(last_id):
            raise ValueError(f"{last_id[:64]!r} is no id of an entry: those are two numbers, 1700000000000-0")
        block = min(block_ms, _MAX_BLOCK_MS) or None
        with self._explained():
            reply: Any = self._redis.xread({stream: last_id}, count=_MAX_READ, block=block)
        parsed: list[_Entry] = []
        for entry in reply[0][1] if reply else []:
            try:
                parsed.append(_parse(entry, parse))
            except MalformedEntryError:
                if not parsed:
                    raise
                break
        return parsed

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except redis.AuthenticationError as error:
            raise ConnectionError(f"the registry at {self._address} refused the password") from error
        except redis.RedisError as error:
            # Redis rejects the many arguments of a script before it checks authentication.
            if "unauthenticated" in str(error):
                raise ConnectionError(f"the registry at {self._address} refused the password") from error
            raise ConnectionError(f"the registry at {self._address} cannot be used: {error}") from error


def _parse(entry: tuple[bytes, dict[bytes, bytes]], parse: Callable[[str, bytes], _Entry]) -> _Entry:
    name = entry[0].decode()
    try:
        return parse(name, entry[1].get(scripts.FIELD, b"null"))
    except ValueError as error:
        raise MalformedEntryError(name, str(error)) from error


def _time(began_at: float | None) -> str:
    return "" if began_at is None else repr(began_at)


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
