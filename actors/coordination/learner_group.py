"""Lifecycle of the learner group: its starts, its failures, and whether it starts again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from actors.coordination.reporting.timeline import LEARNER, SpanKind, Timeline
from actors.coordination.session import SessionFile
from actors.event_history import EventHistory
from actors.run_log import LEARNER_FAILED, RESTARTED, RunLog
from actors.spec import RunSpec


class LearnerGroup:
    """The learner groups of a run, one after the other."""

    def __init__(
        self, spec: RunSpec, session: SessionFile, log: RunLog, history: EventHistory, timeline: Timeline
    ) -> None:
        """Continue with the group of the session. `history` is that of `log`. No call waits for the disk."""
        self._spec, self._session, self._timeline = spec, session, timeline
        self._log, self._history = log, history
        self._starting_at = time.monotonic()
        self._has_echoed = False

    def starting(self, learner: str) -> None:
        """Register the start of the group `learner`. Gives up after too many starts without progress."""
        self._has_echoed = False
        self._starting_at = time.monotonic()
        self._session.save(self._session.current.with_learner_start(learner, self._num_checkpoints()))

    def started(self, checkpoint: str, position: Mapping[str, Any]) -> None:
        """Record from which checkpoint the group continues, and what it repeats. All starts but the first follow a
        failure."""
        self._timeline.add(LEARNER, "loading a checkpoint", SpanKind.WORK, self._starting_at)
        again, num_starts = self._history.repeated_work(position), self._session.current.num_learner_starts
        if num_starts > 1:
            self._log.note_failure(f"{RESTARTED} from checkpoint {checkpoint}; {again}", num_starts - 1)
        elif self._history.num("phase") or position["policy_version"] or position["step"]:
            self._log.add("resume", what=f"going on from checkpoint {checkpoint}; {again}")

    def failed(self, what: str, *, is_echo: bool, is_transient: bool, too_large: str | None) -> None:
        """Record an error of a rank, as `Coordinator.learner_failed` describes."""
        if not self._session.current.error and not (is_echo and self._has_echoed):
            self._has_echoed = is_echo
            if too_large is not None:
                what = self._smaller(too_large, what)
            elif not is_echo:
                self._note_error(what, is_transient=is_transient)
            self._log.note_failure(f"{LEARNER_FAILED}: {what}", 1)

    def _smaller(self, section: str, what: str) -> str:
        """Halve a section's micro-batches for the next group, unless they hold one row. Returns the message."""
        session = self._session.current
        spec = self._spec.with_micro_batches(session.micro_batch_tokens)
        tokens, row = spec.learner.micro_batch_tokens, spec.canvas_tokens
        if section == "sft":
            tokens, row = spec.sft_micro_batch_tokens, spec.sft_tokens
        if tokens // 2 >= row:
            what = f"{what}; retrying with micro-batches of {tokens // 2} tokens instead of {tokens}"
            self._session.save(session.with_micro_batches(section, tokens // 2, what))
            return what
        what = (
            f"{what}; micro-batches of {tokens} tokens cannot be halved, a canvas has {row}: take "
            "sharding.activation_checkpointing=true or more learner.num_workers"
        )
        self._note_error(what, is_transient=False)
        return what

    def _note_error(self, what: str, *, is_transient: bool) -> None:
        session = self._session.current.with_error(what, self._num_checkpoints(), is_transient=is_transient)
        self._session.save(session)

    def _num_checkpoints(self) -> int:
        return self._history.num("checkpoint")
