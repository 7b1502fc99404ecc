"""What the service says of its policy: the versions, and a log of how they came and went."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

import structlog

from actors.registry import PolicyVersion
from deploy.service.host import Backend
from deploy.service.messages import BASE, POLICY, EngineState
from rollout.score import Score

_MAX_EVENTS = 500
_PING_S = 15.0
_POLL_S = 0.5
_FRESH_S = 0.2
_STALE_S = 15.0


def score_of(policy: PolicyVersion | None) -> dict[str, Any] | None:
    """Held-out accuracy at temperature 0; None of a version without one."""
    if policy is None or policy.num_correct is None or not policy.num_problems:
        return None
    score = Score(num_correct=policy.num_correct, num_problems=policy.num_problems)
    return {
        "policy_version": policy.version,
        "num_correct": score.num_correct,
        "num_problems": score.num_problems,
        "accuracy": score.accuracy,
        "interval_95": score.interval,
    }


def newest(states: Sequence[EngineState]) -> EngineState:
    """The engine whose policy was published last: there is more than one answer while a swap goes round."""
    return max(states, key=lambda state: (state.policy.round, state.policy.version))


def policy_body(run: str, states: Sequence[EngineState]) -> dict[str, Any]:
    """`GET /v1/policy`."""
    state = newest(states)
    policy, announced = state.policy, state.announced
    published = policy.version if announced is None else announced.version
    aliases = {POLICY: policy.version} | ({} if state.base is None else {BASE: state.base})
    return {
        "run": run,
        "policy_version": policy.version,
        "round": policy.round,
        "phase": policy.phase,
        "checksum": policy.manifest_digest,
        "score": score_of(state.scored),
        "lag": {"published": published, "behind": max(0, published - policy.version)},
        "aliases": aliases,
        "live": sorted({version.version for one in states for version in one.live}),
        "num_swaps": state.num_swaps,
        "refused": [{"version": refused.version, "why": refused.why} for refused in state.refused],
        "last_error": state.follower.last_error,
    }


def version_body(version: int, states: Sequence[EngineState]) -> dict[str, Any] | None:
    """`GET /v1/policy/{version}`; None where no engine has it."""
    for state in states:
        for policy in (*state.live, *([state.announced] if state.announced else [])):
            if policy.version == version:
                return {
                    "policy_version": version,
                    "round": policy.round,
                    "phase": policy.phase,
                    "checksum": policy.manifest_digest,
                    "score": score_of(policy),
                    "is_live": policy in state.live,
                    "is_serving": policy.version == newest(states).policy.version,
                }
    return None


class Watch:
    """Asks the engines how they stand, and remembers what changed."""

    def __init__(self, backend: Backend) -> None:
        """Watch, once it is started or asked."""
        self._backend = backend
        self._states: list[EngineState] = []
        self._asked_at = -_STALE_S
        self._events: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._boot = uuid.uuid4().hex[:8]
        self._changed = asyncio.Condition()
        self._asking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def ensure_running(self) -> None:
        """Go on asking; from the event loop."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()

    async def states(self) -> list[EngineState]:
        """How the engines stand, at most a moment ago; the last that is known where none answers now."""
        async with self._asking:
            if time.monotonic() - self._asked_at > _FRESH_S:
                await self._ask()
        return self._states

    @property
    def is_stale(self) -> bool:
        """Whether no engine has answered for a while."""
        return time.monotonic() - self._asked_at > _STALE_S

    async def events(self, last_id: str | None) -> AsyncGenerator[bytes, None]:
        """Server-sent events after `last_id`; all that are kept for an id of another life of the service."""
        boot, _, number = (last_id or "").partition("-")
        seen = int(number) if boot == self._boot and number.isdecimal() else 0
        yield b": d1\n\n"
        while True:
            async with self._changed:
                news = [event for event in self._events if event[0] > seen]
                if not news:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _PING_S)
                    news = [event for event in self._events if event[0] > seen]
            for number_, kind, data in news:
                seen = number_
                yield f"id: {self._boot}-{number_}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()
            if not news:
                yield b": ping\n\n"

    async def _run(self) -> None:
        while True:
            try:
                await self.states()
            # An engine that does not answer is a fact of life: the next one may.
            except Exception as error:
                structlog.get_logger().warning("engines_not_heard", error=str(error))
            await asyncio.sleep(_POLL_S)

    async def _ask(self) -> None:
        states = await self._backend.states()
        if not states:
            return
        before, self._states, self._asked_at = self._states, states, time.monotonic()
        for kind, data in _changes(before, states):
            self._num_events += 1
            self._events.append((self._num_events, kind, data | {"time_s": round(time.time(), 3)}))
        async with self._changed:
            self._changed.notify_all()


def _changes(before: list[EngineState], after: list[EngineState]) -> list[tuple[str, dict[str, Any]]]:
    """What happened between two looks."""
    changes: list[tuple[str, dict[str, Any]]] = []
    old, new = newest(before) if before else None, newest(after)
    announced = None if old is None else old.announced
    if new.announced is not None and (announced is None or not announced.has_same_weights(new.announced)):
        changes.append(("published", _facts(new.announced)))
    known = {refused for state in before for refused in state.refused}
    told = {refused: None for state in after for refused in state.refused if refused not in known}
    changes += [("refused", {"version": refused.version, "round": None, "why": refused.why}) for refused in told]
    if old is None or not old.policy.has_same_weights(new.policy):
        changes.append(("serving", _facts(new.policy)))
    live = {policy.version for state in after for policy in state.live}
    gone = {policy.version: policy for state in before for policy in state.live if policy.version not in live}
    return changes + [("retired", _facts(policy)) for policy in gone.values()]


def _facts(policy: PolicyVersion) -> dict[str, Any]:
    return {"version": policy.version, "round": policy.round}
