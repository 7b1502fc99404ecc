"""Single-GPU benchmark of a policy of LLaDA-8B's shape: no Ray, no download, ten minutes.

    python -m benchmarks.gpu [--device cuda] [--tiny] [--stages ceilings ...] [--seconds 600] [--out FILE]

Each stage runs in a separate process with a time limit. If it runs out of memory or time, only that stage fails, and
its rows so far are kept. Each row is appended to `--out` as a line of JSON when it is measured. `--device cpu --tiny`
runs everything in a minute or two as a smoke test; its numbers are meaningless.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from benchmarks.gpu.setting import Row
from benchmarks.gpu.stages import STAGES

_TAIL = 2000


def main() -> None:
    """Run the stages and print their rows. Exits with 1 if a stage failed."""
    args, has_failed = _arguments(), False
    deadline = time.monotonic() + args.seconds
    for name in args.stages:
        for row in _carried_out(name, args, deadline):
            named = {"stage": name, **row}
            has_failed = has_failed or "failure" in row
            print(_in_words(named), flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(named) + "\n")
    sys.exit(has_failed)


def _carried_out(name: str, args: argparse.Namespace, deadline: float) -> Iterator[Row]:
    """Yield the rows of a stage as they are measured, and finally the reason if it failed."""
    limit_s = min(STAGES[name].limit_s, deadline - time.monotonic())
    if limit_s <= 0:
        yield {"failure": f"the {args.seconds:g} s of all stages were over"}
        return
    command = [sys.executable, "-m", "benchmarks.gpu.stages", name, "--device", args.device, *["--tiny"] * args.tiny]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines, said = queue.Queue[str | None](), list[str]()
    readers = [
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True),
        threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True),
    ]
    for reader in readers:
        reader.start()
    ends = time.monotonic() + limit_s
    try:
        while (line := lines.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
            yield json.loads(line)
        if process.wait(max(0.1, ends - time.monotonic())):
            readers[1].join(1.0)
            yield {"failure": _last_words("".join(said)[-_TAIL:], process.returncode)}
    except (queue.Empty, subprocess.TimeoutExpired):
        yield {"failure": f"it was ended after {limit_s:.0f} s"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join(1.0)
        process.stdout.close()
        process.stderr.close()


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_words(said: str, code: int) -> str:
    written = [line for line in said.splitlines() if line.strip()]
    return written[-1].strip() if written else f"it ended with {code}"


def _in_words(row: Row) -> str:
    if "failure" in row:
        return f"{row['stage']:<11} failed: {row['failure']}"
    values = [f"{name} {_number(value)}" for name, value in row.items() if name not in ("stage", "what")]
    return f"{row['stage']:<11} {row['what']:<58} {', '.join(values)}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "unknown" if value is None else str(value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy instead of LLaDA-8B's shape")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=600.0, help="that all stages may take")
    parser.add_argument("--out", type=Path, help="gets a line of JSON for each row, after what it has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
