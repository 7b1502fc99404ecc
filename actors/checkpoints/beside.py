"""What is written while training goes on: in a thread, one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from learner.parallel.patience import patience_s

# The least that it is waited for; its bytes make that longer.
_WRITING_S = 600.0


class Beside:
    """Writes, and says whether it could. Its thread does not keep the process from ending."""

    def __init__(self) -> None:
        self._what, self._within_s = "", 0.0
        self._result: Future[bool] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is being written now."""
        return self._result is not None and not self._result.done()

    def begin(self, what: str, num_bytes: int, write: Callable[[], bool]) -> None:
        """Begin to `write` so many bytes. What came before was asked for its `outcome`."""
        assert not self.is_busy, "one at a time"
        result = Future[bool]()

        def do() -> None:
            try:
                result.set_result(write())
            except Exception as error:
                result.set_exception(error)

        self._what, self._within_s, self._result = what, patience_s(_WRITING_S, num_bytes), result
        threading.Thread(target=do, name="checkpoint", daemon=True).start()

    def wait(self) -> bool:
        """Whether what was begun last has ended, after as long as its bytes may take."""
        return self._result is None or bool(wait([self._result], self._within_s).done)

    def outcome(self) -> bool:
        """What it gave, once it has ended. Raises what it raised, and TimeoutError when it takes too long."""
        assert self._result is not None, "something was begun"
        if not self.wait():
            raise TimeoutError(f"{self._what} is not written after {self._within_s:.0f} s; does its disk answer?")
        return self._result.result()
