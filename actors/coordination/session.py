"""Persistent state of the coordinator, besides the run log, that must survive its restarts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

SESSION = ".session.json"
# Restarts of the learner without progress: after errors, which would repeat, and after deaths, which may have external
# causes.
_MAX_REPEATED_ERRORS, _MAX_REPEATED_DEATHS = 2, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """State of one driver's session of a run: from `d1 train`, or its `--resume`, to its end."""

    driver: str
    """Identifies the driver; a different one begins a new session."""
    num_coordinator_starts: int = 0
    """How often the coordinator has started in this session."""
    num_learner_starts: int = 0
    """How often the learner group has started in this session."""
    learner: str = ""
    """Identifies the learner group that started last."""
    num_checkpoints: int = 0
    """Checkpoints that had been written when the learner group last started."""
    num_repeats: int = 0
    """How often it has restarted in a row without a new checkpoint."""
    error: str = ""
    """Error that the current learner group raised, if any."""
    last_error: str = ""
    """Error that the learner group before it raised."""
    gave_up: str = ""
    """Why the learner group is not started again; empty while it may be."""
    micro_batch_tokens: Mapping[str, int] = field(default_factory=dict)
    """Sizes of micro-batches that were halved after a GPU ran out of memory, by section of the recipe: `sft` or
    `learner`."""
    was_halved: bool = False
    """Whether any were halved since the last start: the next start then does not count as a repetition."""
    is_stopping: bool = False
    """Whether a stop of the run was requested."""
    pools: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the samplers and of the graders, by kind, once a pool was resized."""
    leaving: Sequence[str] = field(default_factory=list)
    """Names of the actors that leave as soon as they are free."""
    untold: Mapping[str, Any] = field(default_factory=dict)
    """The newest version, as it was announced, if the registry has not received it yet; else empty."""

    @classmethod
    def read(cls, directory: Path, driver: str) -> Self:
        """Read the session of a driver. It is new if the file is another driver's, or cannot be read."""
        try:
            found = cls(**json.loads((directory / SESSION).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls(driver=driver)
        return found if found.driver == driver else cls(driver=driver)

    def with_learner_start(self, learner: str, num_checkpoints: int) -> Self:
        """Record the start of a learner group. Gives up after too many starts without a new checkpoint."""
        if learner == self.learner:
            return self  # A repeated call.
        is_first = not self.num_learner_starts or self.was_halved
        is_repeated = not is_first and num_checkpoints == self.num_checkpoints
        repeats = self.num_repeats + 1 if is_repeated else 0
        limit = _MAX_REPEATED_ERRORS if self.error else _MAX_REPEATED_DEATHS
        gave_up = self.gave_up
        if repeats > limit:
            gave_up = self.error or f"the learner group died {repeats} times without progress"
        return replace(
            self,
            num_learner_starts=self.num_learner_starts + 1,
            learner=learner,
            num_checkpoints=num_checkpoints,
            num_repeats=repeats,
            error="",
            last_error=self.error,
            gave_up=gave_up,
            was_halved=False,
        )

    def with_micro_batches(self, section: str, tokens: int, what: str) -> Self:
        """Record smaller micro-batches for the next learner group, after a GPU ran out of memory."""
        sizes = {**self.micro_batch_tokens, section: tokens}
        return replace(self, error=what, micro_batch_tokens=sizes, was_halved=True)

    def with_error(self, what: str, num_checkpoints: int, *, is_transient: bool) -> Self:
        """Record an error of the learner group. Gives up if the previous group raised the same one, without a new
        checkpoint in between, unless the error is transient."""
        is_again = what == self.last_error and num_checkpoints == self.num_checkpoints
        return replace(self, error=what, gave_up=what if is_again and not is_transient else self.gave_up)


class SessionFile:
    """The session of a run directory, written at each change."""

    def __init__(self, directory: Path, session: Session, write: Callable[[Path, str], None]) -> None:
        """Begin with the session that the directory has. `write` replaces a file, now or later."""
        self._directory, self.current, self._write = directory, session, write

    def save(self, session: Session) -> None:
        """Replace the session. Until that is written, a restart loses the change."""
        self.current = session
        self._write(self._directory / SESSION, json.dumps(asdict(session)))

    def change(self, **changes: Any) -> None:
        """Change fields of the session."""
        self.save(replace(self.current, **changes))
