"""Messages between an ingress and an engine: jobs, their events, and the states of engines. They contain no text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from actors.registry.records import AdminState, PolicyVersion
from deploy.requests.families import AnyRequest
from rollout.request import Committed, Completion, Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The choices of one request, all from the same policy version."""

    requests: Mapping[int, AnyRequest]
    """The sampler's request for each unfinished choice. It includes the blocks that another engine has finished."""
    wanted: str | int
    """Alias or policy version."""
    began_with: PolicyVersion | None = None
    """Version of the finished blocks, which must continue with the same weights; None before the first event."""
    shows_canvas: bool = False
    """Whether the canvas is sent after every denoise step, besides finished blocks."""
    tells_blocks: bool = True
    """Whether finished blocks are sent as they come. Each message takes milliseconds. Without them, a job whose engine
    dies starts again."""
    timeout_s: float = 120.0
    """Time limit in seconds, including the time in the queue."""
    request_id: str = ""
    """Id of the HTTP request, for the logs."""

    def after(self, event: Event) -> Job:
        """Return what is left of the job after an event, for another engine to continue."""
        if isinstance(event, Began):
            return replace(self, began_with=self.began_with or event.policy)
        if isinstance(event, BlocksDone):
            request = self.requests[event.choice]
            parts = [event.slots] if request.committed is None else [request.committed, event.slots]
            continued = replace(request, committed=Committed.joined(parts))
            return replace(self, requests={**self.requests, event.choice: continued})
        if isinstance(event, Done):
            rest = {choice: request for choice, request in self.requests.items() if choice != event.choice}
            return replace(self, requests=rest)
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """First event: the version that generates every token of the job."""

    policy: PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksDone:
    """Newly finished blocks of a choice."""

    choice: int
    start: int
    """Their first slot, counted from 0."""
    slots: Committed


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasSeen:
    """Canvas of a choice after a denoise step."""

    choice: int
    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Completion of a choice."""

    choice: int
    completion: Completion
    is_last: bool
    """Whether all choices of the job are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Last event of a job that failed or was refused."""

    status: int
    """HTTP status, if the answer has not begun."""
    code: str
    message: str
    """One sentence for the client."""
    retry_after_s: int | None = None
    """Seconds after which to try again; None if that would not help."""


Event = Began | BlocksDone | CanvasSeen | Done | Refused


def is_last(event: Event) -> bool:
    """Return whether no event of the job follows."""
    return isinstance(event, Refused) or (isinstance(event, Done) and event.is_last)


ENGINE_FAILED = Refused(status=500, code="engine_failed", message="The policy failed; see the service's log.")
"""Last event after an internal error, which another engine would repeat."""
DRAIN_TIMEOUT_S = 50.0
"""Time for requests in progress when a replica of the engine or the ingress is stopped, in seconds."""


class EngineLostError(Exception):
    """The engine of a job is dead or unreachable, or none became available in time. Another can continue the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedVersion:
    """Announced version that failed a check and does not serve."""

    version: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerStatus:
    """Status of an engine's registry follower."""

    registry_reachable: bool
    """Whether the last call to the registry succeeded."""
    num_errors: int
    """Number of failures so far."""
    last_error: str | None
    """Message of the last failure."""
    admin: AdminState
    """The operator's settings, as last read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """State of one engine."""

    replica: str
    """Id of its replica."""
    policy: PolicyVersion
    """Serving version."""
    scored: PolicyVersion | None
    """Version that was evaluated last."""
    announced: PolicyVersion | None
    """Version that was announced last; None before the first."""
    live: tuple[PolicyVersion, ...]
    """Versions in memory."""
    base: int | None
    """Version of the alias `base`; None if there is none."""
    best: int | None
    """Version of the alias `best`; None if there is none."""
    num_running: int
    """Choices that are being denoised."""
    num_waiting: int
    """Choices that wait for a slot."""
    num_swaps: int
    """Number of version swaps so far."""
    refused: tuple[RefusedVersion, ...]
    """Versions refused most recently."""
    follower: FollowerStatus


class Backend(Protocol):
    """Engines that answer jobs: one in this process, or the replicas of a deployment."""

    def stream(self, job: Job) -> AsyncGenerator[list[Event]]:
        """Stream the events of a job; events that arrive together are one list. `Began` is the first, unless the job is
        refused. Raises EngineLostError."""

    async def states(self) -> list[EngineState]:
        """Return the states of all engines that answer."""
