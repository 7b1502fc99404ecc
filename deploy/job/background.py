"""Work of a run's driver in a background thread for the duration of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(work: Callable[[threading.Event], None], name: str, join_s: float) -> Iterator[None]:
    """Run `work` in a thread. It must return once its argument is set, when the block ends; wait `join_s` for that."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(join_s)
