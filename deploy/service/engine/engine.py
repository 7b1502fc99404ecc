"""The engine: one thread that denoises all jobs together, a step at a time.

A job joins at once, and leaves when it is done, cancelled or out of time. Each version in memory has rows of its own;
the thread steps them in turn. Events are passed to each job's callback, on this thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from deploy.requests.families import check_any_request
from deploy.service.contract import ENGINE_FAILED, BlocksDone, CanvasSeen, Done, Event, Job, Refused
from deploy.service.engine.versions import AnyBatch, LoadedVersion, Versions
from rollout.request import Completion

_JOIN_TIMEOUT_S = 30.0
_IDLE_WAIT_S = 1.0
_RETRY_AFTER_S = 1
_STOPPED = Refused(status=503, code="unavailable", message="The engine was stopped; try again.", retry_after_s=5)


@dataclass(kw_only=True, slots=True, eq=False)
class RunningJob:
    """Job in the engine. Only the engine's thread changes it."""

    job: Job
    live: LoadedVersion
    tell: Callable[[Event], None]
    deadline: float
    num_open: int
    """Choices that are not done; 0 once the job has ended."""
    choice_of: dict[int, int] = field(default_factory=dict)
    """The unfinished choices, by their index in the batch."""
    num_shown: dict[int, int] = field(default_factory=dict)
    """For each choice, the slots of the finished blocks that were sent."""


class Engine:
    """Denoises jobs with acquired versions. Thread-safe."""

    def __init__(self, versions: Versions, max_pending: int = 512) -> None:
        """Start the thread.

        Args:
            versions: release a version when a job has ended.
            max_pending: maximum number of choices, running or waiting.
        """
        self._versions, self._max_pending = versions, max_pending
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._num_pending = self._num_running = 0
        self._is_stopping = False
        self._jobs: list[RunningJob] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Choices that are being denoised."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Choices that wait for a slot."""
        return max(0, self._num_pending - self._num_running)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, job: Job, live: LoadedVersion, tell: Callable[[Event], None]) -> RunningJob | Refused:
        """Start a job, whose events go to `tell`, or refuse it. The engine releases `live` when the job has ended."""
        try:
            for request in job.requests.values():
                check_any_request(request, live.config)
        except ValueError as error:
            return Refused(status=400, code="invalid_request", message=f"{error}.")
        with self._wake:
            if self._is_stopping:
                return _STOPPED
            if self._num_pending + len(job.requests) > self._max_pending:
                message = f"{self._num_pending} choices are waiting; try again."
                return Refused(status=429, code="overloaded", message=message, retry_after_s=_RETRY_AFTER_S)
            self._num_pending += len(job.requests)
            deadline = time.monotonic() + job.timeout_s
            running = RunningJob(job=job, live=live, tell=tell, deadline=deadline, num_open=len(job.requests))
            self._post(lambda: self._join(running))
        return running

    def cancel(self, running: RunningJob) -> None:
        """Cancel a job: the next step reuses its slots. Does nothing if it has ended."""
        with self._wake:
            self._post(lambda: self._leave(running, None))

    def close(self) -> None:
        """End the thread, and its jobs with a refusal."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify_all()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.notify_all()

    def _run(self) -> None:
        try:
            self._denoise()
        finally:
            with self._wake:
                self._is_stopping = True
                inbox, self._inbox = self._inbox, []
            for command in inbox:
                # Jobs that were about to join end with the others.
                with suppress(Exception):
                    command()
            for running in list(self._jobs):
                self._end(running, _STOPPED)

    def _denoise(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._jobs or self._is_stopping):
                    self._wake.wait(_IDLE_WAIT_S)
                if self._is_stopping:
                    break
                inbox, self._inbox = self._inbox, []
            for command in inbox:
                command()
            self._expire()
            for live in self._used_versions():
                self._step(live)
            self._num_running = sum(live.batch.num_running for live in self._used_versions() if live.batch)

    def _used_versions(self) -> list[LoadedVersion]:
        return list({id(running.live): running.live for running in self._jobs}.values())

    def _join(self, running: RunningJob) -> None:
        self._jobs.append(running)
        try:
            # Any: the requests were checked to be of its family.
            batch: Any = _batch(running.live)
            for choice, request in running.job.requests.items():
                running.choice_of[batch.submit(request)] = choice
                running.num_shown[choice] = 0 if request.committed is None else len(request.committed)
        # There may be no memory for more rows.
        except Exception as error:
            self._fail(running.live, error)

    def _leave(self, running: RunningJob, refusal: Refused | None) -> None:
        if running.num_open:
            for index in running.choice_of:
                _batch(running.live).cancel(index)
            self._end(running, refusal)

    def _expire(self) -> None:
        now = time.monotonic()
        for running in list(self._jobs):
            if now > running.deadline:
                message = f"No answer within {running.job.timeout_s:.0f} s; try again."
                late = Refused(status=503, code="timeout", message=message, retry_after_s=_RETRY_AFTER_S)
                self._leave(running, late)

    def _step(self, live: LoadedVersion) -> None:
        jobs = self._jobs_of(live)
        try:
            finished = _batch(live).step()
            self._show(live, jobs)
        # The boundary at which a failure becomes an answer: whatever fails, the other versions go on.
        except Exception as error:
            self._fail(live, error)
            return
        for index, completion in finished:
            self._finish(jobs, index, completion)

    def _fail(self, live: LoadedVersion, error: Exception) -> None:
        jobs = self._jobs_of(live)
        structlog.get_logger().exception(
            "engine_step_failed",
            policy_version=live.policy.version,
            error=str(error),
            request_ids=[running.job.request_id for running in jobs],
        )
        # The state of its rows is unknown.
        live.batch = None
        for running in jobs:
            self._end(running, ENGINE_FAILED)

    def _jobs_of(self, live: LoadedVersion) -> list[RunningJob]:
        return [running for running in self._jobs if running.live is live]

    def _show(self, live: LoadedVersion, jobs: list[RunningJob]) -> None:
        """Send finished blocks, and canvases to the jobs that show them."""
        batch, watched = _batch(live), {}
        committed = batch.num_committed()
        for running in jobs:
            for index, choice in running.choice_of.items():
                has_news = running.job.tells_blocks and committed.get(index, 0) > running.num_shown[choice]
                if index in committed and (running.job.shows_canvas or has_news):
                    watched[index] = running, choice
        for index, progress in batch.progress([*watched]).items():
            running, choice = watched[index]
            if running.job.shows_canvas:
                running.tell(CanvasSeen(choice=choice, progress=progress))
            if progress.num_committed > (start := running.num_shown[choice]):
                running.num_shown[choice] = progress.num_committed
                running.tell(BlocksDone(choice=choice, start=start, slots=progress.between(start)))

    def _finish(self, jobs: list[RunningJob], index: int, completion: Completion) -> None:
        for running in jobs:
            if running.num_open and index in running.choice_of:
                choice, running.num_open = running.choice_of.pop(index), running.num_open - 1
                running.tell(Done(choice=choice, completion=completion, is_last=not running.num_open))
                self._count_done(1)
                if not running.num_open:
                    self._end(running, None)
                return

    def _end(self, running: RunningJob, refusal: Refused | None) -> None:
        self._jobs.remove(running)
        self._count_done(running.num_open)
        running.num_open = 0
        self._versions.release(running.live)
        if refusal is not None:
            running.tell(refusal)

    def _count_done(self, num_choices: int) -> None:
        with self._wake:
            self._num_pending -= num_choices


def _batch(live: LoadedVersion) -> AnyBatch:
    if live.batch is None:
        live.batch = live.sampler.open()
    return live.batch
