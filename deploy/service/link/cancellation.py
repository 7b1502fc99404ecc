"""Cancellation: work that is only worth doing while somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class EndedError(Exception):
    """Who waited has gone."""


async def unless(work: Coroutine[Any, Any, _Result], ended: asyncio.Future[Any]) -> _Result:
    """The result of `work`, which is cancelled once `ended` is done: nobody else would stop it. Raises EndedError."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EndedError
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
