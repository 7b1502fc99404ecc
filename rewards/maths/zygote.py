"""The process that judges: a script of its own, which `MathVerifier` starts. Of ours it imports what compares, alone.

A zygote imports the computer algebra once and forks a worker whenever it is told to, so that a worker can be killed at
the price of a fork. Nothing has threads here: Math-Verify needs that, and so does a fork.

The verifier says one byte on the control socket: `w`, with a socket for a new worker, or `k` to kill the worker, which
is answered by a line: the signal that ended it, or 0. Requests and replies on the worker's socket are lines of JSON.
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
# A worker that has once used this share of its memory is replaced: sympy remembers what it has computed.
_WORN_SHARE = 0.5
# They bring the grammar's parser to the forks as it is after use, which is several times as fast.
_WARM_UP = (
    r"\frac{1}{2}",
    r"(1, \sqrt{3}]",
    r"x^2 + 2x \le 3",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\pi, -5",
    "A",
)


def _comparison() -> _Comparison:
    """Import what compares without the packages that it is in: they would import all of ours."""
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
    """Kill a worker, and return how it had ended if it had ended by itself."""
    os.kill(worker, signal.SIGKILL)
    return os.waitpid(worker, 0)[1]


def _work(requests: socket.socket, is_right: _Comparison, cpu_s: float, memory_bytes: int, answers: int) -> None:
    """Answer requests until the verifier has enough of this worker, or it of itself."""
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
            # The kernel ends a process by this signal, whatever it is doing: it needs no turn of the interpreter.
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
        # It has met expressions that nobody foresaw. The verifier counts them, and takes a new worker.
        return {"error": type(error).__name__}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    descriptor, cpu_s, memory_bytes, answers = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    _zygote(control, _comparison(), float(cpu_s), int(memory_bytes), int(answers))
