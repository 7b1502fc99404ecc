"""Persistent state of the coordinator beside the run log: what it must not forget when it restarts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from actors.whole_file import write_whole

SESSION = ".session.json"
# Errors of the learner that another try would only repeat, and deaths, which may have come from outside.
_MAX_REPEATED_ERRORS, _MAX_REPEATED_DEATHS = 2, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One driver's time with a run: from `d1 train`, or its `--resume`, to its end."""

    driver: str
    """Names the driver: another one begins another session."""
    num_coordinator_starts: int = 0
    """How often the coordinator has started in this session."""
    num_learner_starts: int = 0
    """How often the learner group has."""
    learner: str = ""
    """Names the learner group that started last."""
    num_checkpoints: int = 0
    """Checkpoints that had been written when it last started."""
    num_repeats: int = 0
    """How often it has started again without one more."""
    error: str = ""
    """What it raised since it last started, if it did."""
    last_error: str = ""
    """What the one before it raised."""
    gave_up: str = ""
    """Why it is not started again; empty while it may be."""
    micro_batch_tokens: Mapping[str, int] = field(default_factory=dict)
    """What micro-batches were halved to after a GPU's memory had run out, by the section of the recipe: `sft` or
    `learner`."""
    was_halved: bool = False
    """Whether any were since it last started: then the next start is no repetition."""
    is_stopping: bool = False
    """Somebody wants the run to stop."""
    pools: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of the samplers and of the graders, by kind, once their number was changed."""
    leaving: Sequence[str] = field(default_factory=list)
    """The names of those that leave as soon as they are free."""
    untold: Mapping[str, Any] = field(default_factory=dict)
    """The newest version, as it was announced, where the run went on before the registry was told of it; else empty."""

    @classmethod
    def read(cls, directory: Path, driver: str) -> Self:
        """The session of a driver, which is new where the file is another's, or cannot be read."""
        try:
            found = cls(**json.loads((directory / SESSION).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls(driver=driver)
        return found if found.driver == driver else cls(driver=driver)

    def write(self, directory: Path) -> Self:
        """Keep it, whole or not at all. A disk that is full leaves the older one: so much is forgotten."""
        write_whole(directory / SESSION, json.dumps(asdict(self)))
        return self

    def with_learner_start(self, learner: str, num_checkpoints: int) -> Self:
        """A learner group starts, where so many checkpoints have been written; unless one has in vain too often."""
        if learner == self.learner:
            return self  # Asked before.
        is_first = not self.num_learner_starts or self.was_halved
        is_repeated = not is_first and num_checkpoints == self.num_checkpoints
        repeats = self.num_repeats + 1 if is_repeated else 0
        limit = _MAX_REPEATED_ERRORS if self.error else _MAX_REPEATED_DEATHS
        gave_up = self.gave_up
        if repeats > limit:
            gave_up = self.error or f"the learner group died {repeats} times and came no further"
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
        """A GPU's memory ran out, and the next learner group will need less."""
        sizes = {**self.micro_batch_tokens, section: tokens}
        return replace(self, error=what, micro_batch_tokens=sizes, was_halved=True)

    def with_error(self, what: str, num_checkpoints: int, *, is_transient: bool) -> Self:
        """The learner group raised. A third would raise what two have, if they came no further and it did not pass."""
        is_again = what == self.last_error and num_checkpoints == self.num_checkpoints
        return replace(self, error=what, gave_up=what if is_again and not is_transient else self.gave_up)
