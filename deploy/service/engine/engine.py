"""The engine: one thread that denoises all requests together, a step at a time.

A job joins at once and leaves when it is done, cancelled or out of time. Each version in memory has rows of its own;
the thread steps them in turn. What happens is told to each job's callback, on this thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from deploy.requests.families import check_any_request
from deploy.service.contract import ENGINE_FAILED, BlocksDone, CanvasSeen, Done, Event, Job, Refused
from deploy.service.engine.loaded_version import Batch, LoadedVersion
from deploy.service.engine.versions import Versions
from rollout.request import Completion

_JOIN_TIMEOUT_S = 30.0
_IDLE_WAIT_S = 1.0
_RETRY_AFTER_S = 1
_STOPPED_RETRY_AFTER_S = 5

OnEvent = Callable[[Event], None]


class BusyError(Exception):
    """The engine takes nothing more for now; `refusal` says so to the client."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True)
class _Task:
    """A job under way. The engine's thread alone changes it."""

    job: Job
    live: LoadedVersion
    tell: OnEvent
    deadline: float
    choice_of: dict[int, int]
    """The batch's index of each choice that is not done, and the choice."""
    num_shown: list[int]
    """For each choice, slots of the finished blocks that were told."""


class Engine:
    """Denoises jobs with versions that others acquire. Threads may call it at the same time."""

    def __init__(self, versions: Versions, max_pending: int = 512) -> None:
        """Start the thread.

        Args:
            versions: told when a job no longer needs its version.
            max_pending: choices that are denoised or wait for it.
        """
        self._versions, self._max_pending = versions, max_pending
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._num_pending = self._num_running = self._num_submitted = 0
        self._is_stopping = False
        self._tasks: dict[int, _Task] = {}
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

    def submit(self, job: Job, live: LoadedVersion, tell: OnEvent) -> int:
        """Let a job join. The engine releases `live` when it has ended. Returns the job's ticket.

        Raises:
            ValueError: a request that the policy cannot serve.
            BusyError: there is no room, or the engine was stopped.
        """
        for request in job.whole_requests:
            check_any_request(request, live.config)
        with self._wake:
            if self._is_stopping:
                raise BusyError(_unavailable("The engine was stopped; try again.", _STOPPED_RETRY_AFTER_S))
            if self._num_pending + len(job.requests) > self._max_pending:
                raise BusyError(
                    Refused(
                        status=429,
                        code="overloaded",
                        message=f"{self._num_pending} choices are waiting; try again.",
                        retry_after_s=_RETRY_AFTER_S,
                    )
                )
            self._num_pending += len(job.requests)
            self._num_submitted += 1
            ticket = self._num_submitted
            deadline = time.monotonic() + job.timeout_s
            self._post(lambda: self._join(ticket, _Task(job, live, tell, deadline, {}, [])))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Forget a job: the next step gives its slots to others. One that has ended is left alone."""
        with self._wake:
            self._post(lambda: self._leave(ticket))

    def close(self) -> None:
        """End the thread; what is under way is told that it failed."""
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
                # Who was about to join is told too.
                with suppress(Exception):
                    command()
            for ticket in list(self._tasks):
                self._end(ticket, _unavailable("The engine was stopped; try again.", _STOPPED_RETRY_AFTER_S))

    def _denoise(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._tasks or self._is_stopping):
                    self._wake.wait(_IDLE_WAIT_S)
                if self._is_stopping:
                    break
                inbox, self._inbox = self._inbox, []
            for command in inbox:
                command()
            self._expire()
            for live in {id(task.live): task.live for task in self._tasks.values()}.values():
                self._step(live)
            self._num_running = sum(
                live.batch.num_running
                for live in {id(t.live): t.live for t in self._tasks.values()}.values()
                if live.batch
            )

    def _join(self, ticket: int, task: _Task) -> None:
        self._tasks[ticket] = task
        try:
            batch = _batch(task.live)
            for choice, request in enumerate(task.job.whole_requests):
                task.choice_of[batch.submit(request)] = choice
                task.num_shown.append(0 if request.committed is None else len(request.committed))
        # There may be no memory for more rows.
        except Exception as error:
            self._fail(task.live, error)

    def _leave(self, ticket: int) -> None:
        task = self._tasks.get(ticket)
        if task is not None:
            for index in task.choice_of:
                _batch(task.live).cancel(index)
            self._end(ticket, None)

    def _expire(self) -> None:
        now = time.monotonic()
        for ticket, task in list(self._tasks.items()):
            if now > task.deadline:
                for index in task.choice_of:
                    _batch(task.live).cancel(index)
                sentence = f"No answer within {task.job.timeout_s:.0f} s; try again."
                self._end(ticket, _unavailable(sentence, _RETRY_AFTER_S, code="timeout"))

    def _step(self, live: LoadedVersion) -> None:
        tickets = self._tickets_of(live)
        try:
            finished = _batch(live).step()
            self._show(live, tickets)
        # The boundary at which a failure becomes an answer: whatever fails, the other versions go on.
        except Exception as error:
            self._fail(live, error)
            return
        for index, completion in finished:
            self._finish(tickets, index, completion)

    def _fail(self, live: LoadedVersion, error: Exception) -> None:
        tickets = self._tickets_of(live)
        structlog.get_logger().exception(
            "engine_step_failed",
            policy_version=live.policy.version,
            error=str(error),
            request_ids=[self._tasks[ticket].job.request_id for ticket in tickets],
        )
        # Its rows are in a state that nobody knows.
        live.batch = None
        for ticket in tickets:
            self._end(ticket, ENGINE_FAILED)

    def _tickets_of(self, live: LoadedVersion) -> list[int]:
        return [ticket for ticket, task in self._tasks.items() if task.live is live]

    def _show(self, live: LoadedVersion, tickets: list[int]) -> None:
        """Tell of finished blocks, and of the whole canvas to those who watch it."""
        batch, watched = _batch(live), {}
        committed = batch.num_committed()
        for ticket in tickets:
            task = self._tasks[ticket]
            for index, choice in task.choice_of.items():
                has_news = task.job.tells_blocks and committed.get(index, 0) > task.num_shown[choice]
                if index in committed and (task.job.shows_canvas or has_news):
                    watched[index] = task, choice
        for index, progress in batch.progress([*watched]).items():
            task, choice = watched[index]
            if task.job.shows_canvas:
                task.tell(CanvasSeen(choice=choice, progress=progress))
            if progress.num_committed > (start := task.num_shown[choice]):
                task.num_shown[choice] = progress.num_committed
                task.tell(BlocksDone(choice=choice, start=start, slots=progress.between(start)))

    def _finish(self, tickets: list[int], index: int, completion: Completion) -> None:
        for ticket in tickets:
            task = self._tasks.get(ticket)
            if task is not None and index in task.choice_of:
                task.tell(Done(choice=task.choice_of.pop(index), completion=completion))
                self._count_done(1)
                if not task.choice_of:
                    self._end(ticket, None)
                return

    def _end(self, ticket: int, refusal: Refused | None) -> None:
        task = self._tasks.pop(ticket)
        self._count_done(len(task.choice_of))
        self._versions.release(task.live)
        if refusal is not None:
            task.tell(refusal)

    def _count_done(self, num_choices: int) -> None:
        with self._wake:
            self._num_pending -= num_choices


def _batch(live: LoadedVersion) -> Batch:
    if live.batch is None:
        live.batch = live.sampler.open()
    return live.batch


def _unavailable(message: str, retry_after_s: int, code: str = "unavailable") -> Refused:
    return Refused(status=503, code=code, message=message, retry_after_s=retry_after_s)
