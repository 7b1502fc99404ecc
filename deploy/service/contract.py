"""What travels between an ingress and an engine: token ids and arrays, never text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from actors.registry.records import AdminState, PolicyVersion
from rollout.grammar.grammar import Grammar
from rollout.renoising.request import RenoisingRequest
from rollout.request import Committed, Completion, Progress, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Choices that one policy version makes."""

    requests: tuple[Request | RenoisingRequest, ...]
    """One for each choice. One that comes with blocks that were finished before goes on from there."""
    wanted: str | int
    """An alias, or a policy version."""
    grammar: Grammar | None = None
    """Of all of them, which come without: it may have megabytes."""
    began_with: PolicyVersion | None = None
    """What another engine began it with: then nothing else will do. None where it has not begun."""
    shows_canvas: bool = False
    """Whether every denoise step is shown, and not only finished blocks."""
    tells_blocks: bool = True
    """Whether finished blocks are told as they come. Each message takes milliseconds; without them, a job whose engine
    dies begins again."""
    timeout_s: float = 120.0
    """Time that it may take, waiting included, in seconds."""
    request_id: str = ""
    """What the logs call the request that it answers."""

    @property
    def whole_requests(self) -> tuple[Request | RenoisingRequest, ...]:
        """The requests, with their grammar."""
        return tuple(
            replace(request, grammar=self.grammar) if isinstance(request, Request) else request
            for request in self.requests
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """The first event: the version that makes every token of the job."""

    policy: PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksDone:
    """One or more blocks of a choice are finished."""

    choice: int
    start: int
    """The first slot of them, counted from 0."""
    slots: Committed
    """Their record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasSeen:
    """A choice as it stands after a denoise step."""

    choice: int
    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A choice is complete."""

    choice: int
    completion: Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The last event of a job that is not completed."""

    status: int
    """The HTTP status that says so, if nothing was sent yet."""
    code: str
    message: str
    """For the client: a sentence."""
    retry_after_s: int | None = None
    """When to try again; None where that would not help."""


Event = Began | BlocksDone | CanvasSeen | Done | Refused


ENGINE_FAILED = Refused(status=500, code="engine_failed", message="The policy failed; see the service's log.")
"""The end of a job that failed by a mistake of ours, which another engine would make again."""
DRAIN_TIMEOUT_S = 50.0
"""Seconds that requests under way have when a replica of the engine or the ingress is stopped."""


def num_open_after(events: Sequence[Event], num_open: int) -> int:
    """Choices of a job that are open after `events`, of the `num_open` before: none after a refusal."""
    if isinstance(events[-1], Refused):
        return 0
    return num_open - sum(isinstance(event, Done) for event in events)


class EngineLostError(Exception):
    """The engine of a job died or is out of reach, or there was none in time. Another can continue the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedVersion:
    """A version that was announced and is not served."""

    version: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerStatus:
    """How an engine hears of new versions."""

    registry_reachable: bool
    """Whether the registry answered the last time it was asked."""
    num_errors: int
    """Failures so far."""
    last_error: str | None
    """What the last of them was."""
    admin: AdminState
    """What an operator wants, as last heard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """One engine, as it says of itself."""

    replica: str
    """Its id."""
    policy: PolicyVersion
    """What a request for `policy` gets now."""
    scored: PolicyVersion | None
    """The version that was last evaluated, of those heard of."""
    announced: PolicyVersion | None
    """The version that was announced last; None before the first."""
    live: tuple[PolicyVersion, ...]
    """The versions in memory."""
    base: int | None
    """The version behind `base`; None where there is none."""
    best: int | None
    """The version behind `best`; None where there is none."""
    num_running: int
    """Choices that are being denoised."""
    num_waiting: int
    """Choices that wait for a slot."""
    num_swaps: int
    """Times that it took a new version."""
    refused: tuple[RefusedVersion, ...]
    """The newest of the versions that it does not serve, and why."""
    follower: FollowerStatus
    """How it hears of new ones."""


class Backend(Protocol):
    """Whoever answers jobs: an engine in this process, or replicas elsewhere."""

    def stream(self, job: Job) -> AsyncGenerator[list[Event]]:
        """The events of a job, those that came together in one list. The first is `Began` or `Refused`; the last is
        `Refused`, or the `Done` of the last choice. Raises EngineLostError."""

    async def states(self) -> list[EngineState]:
        """Every engine that answers, as it says of itself."""

    async def aclose(self) -> None:
        """Close what is open and nobody uses."""
