"""Background writing of checkpoints: one at a time, in a thread, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from learner.parallel.timeouts import transfer_timeout_s

# Minimum timeout, extended by the size of the write.
_WRITING_S = 600.0


class BackgroundWriter:
    """Background writer, one item at a time. Its daemon thread does not keep the process alive."""

    def __init__(self) -> None:
        self._what, self._within_s = "", 0.0
        self._result: Future[bool] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a write is in progress."""
        return self._result is not None and not self._result.done()

    def begin(self, what: str, num_bytes: int, write: Callable[[], bool]) -> None:
        """Start `write`, which writes `num_bytes`. The `outcome` of the previous one must have been collected."""
        assert not self.is_busy, "one at a time"
        result = Future[bool]()

        def do() -> None:
            try:
                result.set_result(write())
            except Exception as error:
                result.set_exception(error)

        self._what, self._within_s, self._result = what, transfer_timeout_s(_WRITING_S, num_bytes), result
        threading.Thread(target=do, name="checkpoint", daemon=True).start()

    def wait(self) -> bool:
        """Wait for the last write, up to its timeout by size; returns whether it has ended."""
        return self._result is None or bool(wait([self._result], self._within_s).done)

    def outcome(self) -> bool:
        """Return the last write's result. Raises its exception, and TimeoutError if it takes too long."""
        assert self._result is not None, "something was begun"
        if not self.wait():
            raise TimeoutError(f"{self._what} was not written within {self._within_s:.0f} s; check its disk")
        return self._result.result()
