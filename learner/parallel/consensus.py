"""Consensus of a learner's ranks: rank 0 decides and broadcasts its decisions.

A rank that takes one step more than another, or finds another checkpoint, runs another collective than its peers: gloo
aborts at best. So everything that ranks branch on goes through `Ranks.broadcast_decision` or `Ranks.broadcast_tensors`,
and never comes from a rank's own clock or disk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from learner.parallel.progress import PROGRESS
from learner.parallel.timeouts import COLLECTIVE_TIMEOUT_S

HEARTBEAT_S = 5.0
"""Seconds between heartbeats of a busy rank 0; the others never wait longer than this in one collective."""
_LENGTH = struct.Struct("<Q")


class _State(IntEnum):
    AT_WORK, DONE, FAILED = range(3)


class LeaderFailedError(RuntimeError):
    """Rank 0 failed at work that the others wait for; rank 0 itself raises the cause."""


def is_peer_failure(error: Exception) -> bool:
    """Return whether a collective failed because another rank ended, whose own error is the cause."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


class Ranks:
    """The processes of one learner group. Every method is a collective: all ranks call it, in the same order."""

    def __init__(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Use the running process group, or this process alone if there is none; `timeout_s` is the group's."""
        self.is_alone = not dist.is_initialized()
        self.rank, self.size = (0, 1) if self.is_alone else (dist.get_rank(), dist.get_world_size())
        # Always gloo: decisions are small and on the CPU, whichever device the policy is on.
        timeout = timedelta(seconds=timeout_s)
        self._group = None if self.is_alone else dist.new_group(backend="gloo", timeout=timeout)
        # One thread, so that rank 0 can send heartbeats while it works.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank-0")

    def broadcast_decision(self, decide: Callable[[], Any]) -> Any:
        """Return on every rank what `decide` returns on rank 0 (JSON).

        It may take long: rank 0 sends a heartbeat every `HEARTBEAT_S` seconds.

        Raises:
            LeaderFailedError: on the other ranks, if `decide` raises on rank 0.
        """
        return json.loads(self._from_rank_0(lambda: json.dumps(decide()).encode()))

    def broadcast_tensors(self, make: Callable[[], tuple[Any, Mapping[str, Tensor]]]) -> tuple[Any, dict[str, Tensor]]:
        """Return on every rank what `make` returns on rank 0: a decision (JSON) and tensors on the CPU.

        Raises LeaderFailedError as `broadcast_decision` does.
        """

        def packed() -> bytes:
            decision, tensors = make()
            text = json.dumps(decision).encode()
            return _LENGTH.pack(len(text)) + text + save(dict(tensors))

        message = self._from_rank_0(packed)
        (length,) = _LENGTH.unpack_from(message)
        text, tensors = message[_LENGTH.size : _LENGTH.size + length], message[_LENGTH.size + length :]
        return json.loads(text), load(tensors)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank (JSON), in their order, on rank 0; an empty list on the others."""
        if self.is_alone:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with PROGRESS.in_collective("a gather"):
            dist.gather_object(json.dumps(value), found, dst=0, group=self._group)
        return [json.loads(text) for text in found or ()]

    def on_rank_0(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 while all ranks wait. Raises LeaderFailedError as `broadcast_decision` does."""

        def nothing() -> bytes:
            work()
            return b""

        self._from_rank_0(nothing)

    def _from_rank_0(self, work: Callable[[], bytes]) -> bytes:
        if self.rank:
            return self._follow()
        with PROGRESS.unbounded():
            return work() if self.is_alone else self._lead(work)

    def _lead(self, work: Callable[[], bytes]) -> bytes:
        result: Future[bytes] = self._thread.submit(work)
        while not wait([result], timeout=HEARTBEAT_S).done:
            self._send_header(_State.AT_WORK, 0)
        if (error := result.exception()) is not None:
            self._send_header(_State.FAILED, 0)
            raise error
        message = result.result()
        self._send_header(_State.DONE, len(message))
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        return message

    def _follow(self) -> bytes:
        header = torch.zeros(2, dtype=torch.int64)
        while True:
            self._broadcast(header)
            state, length = header.tolist()
            if state == _State.FAILED:
                raise LeaderFailedError("rank 0 of the learner failed")
            if state == _State.DONE:
                break
        message = torch.empty(length, dtype=torch.uint8)
        if length:
            self._broadcast(message)
        return message.numpy().tobytes()

    def _send_header(self, state: _State, length: int) -> None:
        self._broadcast(torch.tensor([state, length]))

    def _broadcast(self, tensor: Tensor) -> None:
        with PROGRESS.in_collective("a broadcast from rank 0"):
            dist.broadcast(tensor, 0, group=self._group)
