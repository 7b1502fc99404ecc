"""Zygote process that imports Math-Verify once and forks killable workers.

`MathVerifier` starts it as a script. A killed worker costs only a fork, not another import of the computer algebra.
Only the comparison is imported from this project. There are no threads here: Math-Verify requires that, and so does a
fork.

Control socket: the verifier sends one byte. `w` comes with a socket for a new worker. `k` kills the worker, and is
answered by a line with the signal that ended it, now or earlier, or 0. Requests and replies on the worker's socket are
lines of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_Comparison = Callable[[dict[str, Any]], bool]
_PR_SET_PDEATHSIG = 1
# A worker that has used this share of its memory is replaced, since sympy caches its results.
_WORN_SHARE = 0.5
# Parsed before forking, so that workers inherit the parser's caches, which makes it several times as fast.
_WARM_UP = (
    r"\frac{1}{2}",
    r"(1, \sqrt{3}]",
    r"x^2 + 2x \le 3",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\pi, -5",
    "A",
)


def _comparison() -> _Comparison:
    """Import the comparison without running the `__init__` of its packages, which would import the whole project."""
    folder = Path(__file__).parent
    for name, path in (("rewards", folder.parent), ("rewards.maths", folder)):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    from rewards.maths.comparison import is_right

    return is_right


def _zygote(control: socket.socket, is_right: _Comparison, cpu_s: float, memory_bytes: int, answers: int) -> None:
    for text in _WARM_UP:
        is_right({"gold": text, "answer": f"{text} ", "gold_percent": False, "answer_percent": False})
    gc.collect()
    gc.freeze()
    control.sendall(b"\n")
    worker = 0
    while True:
        order, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if order == b"w":
            worker = os.fork()
            if worker == 0:
                control.close()
                _work(socket.socket(fileno=sockets[0]), is_right, cpu_s, memory_bytes, answers)
                os._exit(0)
            os.close(sockets[0])
            continue
        status = _end(worker) if worker else 0
        worker = 0
        if order != b"k":
            return
        control.sendall(b"%d\n" % (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0))


def _end(worker: int) -> int:
    """Kill a worker. Returns its wait status, which tells how it ended if it had already done so."""
    os.kill(worker, signal.SIGKILL)
    return os.waitpid(worker, 0)[1]


def _work(requests: socket.socket, is_right: _Comparison, cpu_s: float, memory_bytes: int, answers: int) -> None:
    """Answer requests until the verifier closes the socket."""
    zygote = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with requests.makefile("rb") as lines:
        for number, line in enumerate(lines, start=1):
            # The kernel kills the process by this signal even while the interpreter is blocked in C code.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            reply = _judge(is_right, json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            reply["worn"] = number >= answers or peak_bytes > _WORN_SHARE * memory_bytes
            requests.sendall(json.dumps(reply).encode() + b"\n")


def _judge(is_right: _Comparison, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"right": is_right(request)}
    except Exception as error:
        # For example an unforeseen expression. The verifier counts it.
        return {"error": type(error).__name__}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    descriptor, cpu_s, memory_bytes, answers = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    _zygote(control, _comparison(), float(cpu_s), int(memory_bytes), int(answers))
