"""Peak memory by kind of process: GPU memory, or host memory in a rehearsal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from typing import Literal

from benchmarks.processes.run_processes import RunProcesses

_EVERY_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Ray replaces a process's command line by its actor's class.
_NAMES = {
    r"ray::SamplerWorker\b": "a sampler",
    r"ray::RayTrainWorker\b": "a learner worker",
    r"ray::ServeReplica:.*[Ee]ngine": "an engine",
}
ALL = "all processes together"


class MemoryWatch:
    """Polls the memory of a command's processes every second, on a thread."""

    def __init__(self, processes: RunProcesses, device: Literal["cuda", "cpu"]) -> None:
        """Start polling."""
        self.most: dict[str, int] = {}
        """Peak bytes by kind of process."""
        self._processes, self._device = processes, device
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop polling."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            titles = {process.pid: process.title for process in self._processes.living()}
            used = _on_gpu("compute-apps=pid,used_memory") if self._device == "cuda" else _resident(titles)
            for pid, num_bytes in used:
                # Inside a container the driver may report other process ids than ours.
                who = next((name for title, name in _NAMES.items() if re.match(title, titles.get(pid, ""))), None)
                if who is not None:
                    self._note(who, num_bytes)
            if self._device == "cuda" and (whole := _on_gpu("gpu=index,memory.used")):
                self._note(ALL, sum(num_bytes for _, num_bytes in whole))

    def _note(self, who: str, num_bytes: int) -> None:
        self.most[who] = max(num_bytes, self.most.get(who, 0))


def _on_gpu(query: str) -> list[tuple[int, int]]:
    """Query the driver for pairs of a number (process id or GPU index) and bytes. Returns none if it has no answer."""
    if (command := shutil.which("nvidia-smi")) is None:
        return []
    asked = [command, f"--query-{query}", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    found = (re.fullmatch(r"(\d+), *(\d+)", line.strip()) for line in said.splitlines())
    return [(int(pair[1]), int(pair[2]) << 20) for pair in found if pair is not None]


def _resident(pids: dict[int, str]) -> list[tuple[int, int]]:
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                found.append((pid, int(file.read().split()[1]) * _PAGE_BYTES))
        except OSError:
            continue  # The process has ended.
    return found
