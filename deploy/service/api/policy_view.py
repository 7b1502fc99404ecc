"""Views of the policy and its versions, from the states of the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from actors.registry.records import BASE, BEST, POLICY, PolicyVersion
from deploy.service.api import replies
from deploy.service.contract import Backend, EngineState
from rewards.score import Score

_FRESH_S = 0.2
_STALE_S = 15.0


def _facts(policy: PolicyVersion) -> dict[str, Any]:
    return {
        "policy_version": policy.version,
        "round": policy.round,
        "phase": policy.phase,
        "checksum": policy.manifest_digest,
    }


def _score_of(policy: PolicyVersion | None) -> replies.ScoreReply | None:
    """Return the held-out accuracy at temperature 0; None if the version was not evaluated."""
    if policy is None or policy.num_correct is None or not policy.num_problems:
        return None
    score = Score(num_correct=policy.num_correct, num_problems=policy.num_problems)
    return replies.ScoreReply(
        policy_version=policy.version,
        num_correct=score.num_correct,
        num_problems=score.num_problems,
        accuracy=score.accuracy,
        interval_95=list(score.interval),
    )


def newest(states: Sequence[EngineState]) -> EngineState:
    """Return the state of the engine with the newest policy: engines differ during a swap."""
    return max(states, key=lambda state: (state.policy.round, state.policy.version))


def policy_body(run: str, states: Sequence[EngineState]) -> replies.Policy:
    """Return the body of `GET /v1/policy`."""
    state = newest(states)
    policy, announced = state.policy, state.announced
    published = policy.version if announced is None else announced.version
    aliases = {POLICY: policy.version, BASE: state.base, BEST: state.best}
    return replies.Policy(
        run=run,
        score=_score_of(state.scored),
        **_facts(policy),
        lag=replies.Lag(published=published, behind=max(0, published - policy.version)),
        aliases={name: version for name, version in aliases.items() if version is not None},
        pinned=state.follower.admin.pinned,
        paused=state.follower.admin.is_paused,
        live=sorted({version.version for one in states for version in one.live}),
        num_swaps=state.num_swaps,
        refused=list(state.refused),
        last_error=state.follower.last_error,
    )


def known(version: int, states: Sequence[EngineState]) -> PolicyVersion | None:
    """Return the metadata of a version that the engines know; None if they do not know it."""
    policies = (policy for state in states for policy in (*state.live, state.announced) if policy is not None)
    return next((policy for policy in policies if policy.version == version), None)


def version_body(policy: PolicyVersion, states: Sequence[EngineState]) -> replies.PolicyOfVersion:
    """Return the body of `GET /v1/policy/{version}`."""
    return replies.PolicyOfVersion(
        score=_score_of(policy),
        **_facts(policy),
        is_live=any(policy.version == live.version for state in states for live in state.live),
        is_serving=policy.version == newest(states).policy.version,
    )


class EngineWatch:
    """Cached states of the engines."""

    def __init__(self, backend: Backend) -> None:
        """Read from `backend` on demand, because each call delays an engine's denoising a little."""
        self._backend = backend
        self._states: list[EngineState] = []
        self._asked_at = self._answered_at = -_STALE_S
        self._asking = asyncio.Lock()

    async def states(self) -> list[EngineState]:
        """Return the states, up to 0.2 s old; the last known ones if no engine answers."""
        async with self._asking:
            # A caller that waited for another one shares its result: without an engine, each call takes seconds.
            if time.monotonic() - self._asked_at > _FRESH_S:
                states = await self._backend.states()
                self._asked_at = time.monotonic()
                if states:
                    self._states, self._answered_at = states, self._asked_at
        return self._states

    @property
    def is_stale(self) -> bool:
        """Whether no engine has answered for 15 s."""
        return time.monotonic() - self._answered_at > _STALE_S
