"""A fake `d1 train` without Ray: processes with a run's titles, events, checkpoints, and resuming.

    fake_train.py FLAW NUM_ROUNDS name=NAME runs_dir=DIRECTORY [--resume-or-start]

FLAW is `none`, `double` (repeats a round after a learner's death without reporting a restart), `orphan` (leaves a
process behind) or `hang` (waits for a stopped coordinator).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROLES = {
    "SamplerWorker": 2,
    "GraderWorker": 1,
    "RayTrainWorker": 2,
    "TrainController": 1,
    "Coordinator": 1,
    "WeightStore": 1,
    "RegistryServer": 1,
}
ROUND_S, CHECKPOINT_S = 0.05, 0.05


class Worker:
    """A process that reads from its parent, and so ends with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(["bash", "-c", f"exec -a ray::{name} cat"], stdin=subprocess.PIPE)

    def is_healthy(self) -> bool:
        return self.process.poll() is None and not self.is_stopped()

    def is_stopped(self) -> bool:
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False


class Run:
    def __init__(self, flaw: str, num_rounds: int, directory: Path) -> None:
        self.flaw, self.num_rounds, self.directory = flaw, num_rounds, directory
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.workers = [Worker(name) for name, count in ROLES.items() for _ in range(count)]
        if flaw == "orphan":
            subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
        self.write("phase", phase="rl", num_steps=num_rounds)

    def write(self, event: str, **values: object) -> None:
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "time_s": time.time(), **values}) + "\n")

    def newest(self) -> int:
        names = [path.name for path in (self.directory / "checkpoints").glob("rl-*")]
        return max((int(name[3:]) for name in names), default=0)

    def checkpoint(self, done: int) -> None:
        directory = self.directory / "checkpoints" / f"rl-{done:06d}"
        partial = directory.with_name(f".{directory.name}.partial")
        partial.mkdir(exist_ok=True)
        time.sleep(CHECKPOINT_S)
        (partial / "model.safetensors").write_text(f"weights after {done}")
        if not directory.exists():
            partial.rename(directory)
        self.write("checkpoint", path=f"checkpoints/{directory.name}", phase="rl", round=done, policy_version=done + 1)

    def replace(self, worker: Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        self.workers[self.workers.index(worker)] = Worker(worker.name)

    def rounds(self) -> None:
        index = self.newest()
        while index < self.num_rounds:
            time.sleep(ROUND_S)
            index = self.supervise(index)
            if index == self.num_rounds:
                break
            self.write(
                "round",
                round=index,
                policy_version=index + 2,
                reward=index / 10,
                num_completions=8,
                num_failed_groups=0,
                num_ungraded={},
                mean_staleness=0.0,
                max_staleness=0.0,
            )
            index += 1
            if index % 5 == 0:
                print(f"round {index}", flush=True)
                self.checkpoint(index)

    def supervise(self, index: int) -> int:
        """Replace unhealthy workers. Returns the next round."""
        for worker in self.workers:
            if worker.is_healthy():
                continue
            if worker.name in ("Coordinator", "WeightStore", "TrainController"):
                while self.flaw == "hang" and worker.is_stopped():
                    time.sleep(0.01)
                if worker.is_healthy():
                    continue
                print(f"d1: the run failed: the {worker.name} died; --resume goes on", flush=True)
                sys.exit(1)
            self.replace(worker)
            if worker.name == "RayTrainWorker":
                if self.flaw == "double":
                    index = max(0, index - 2)
                    continue
                what = f"the learner group restarted from checkpoint {self.newest()}"
                self.write("failure", what=what, attempt=1)
                index = self.newest()
        return index


def main() -> None:
    flaw, num_rounds = sys.argv[1], int(sys.argv[2])
    facts = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
    run = Run(flaw, num_rounds, Path(facts["runs_dir"]) / facts["name"])
    run.rounds()
    run.write("done", seconds=1.0)
    print("done", flush=True)


if __name__ == "__main__":
    main()
