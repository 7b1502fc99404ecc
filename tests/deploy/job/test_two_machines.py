"""Runs on several machines: the loss of one, one that does not see the run directory, and a laptop that submits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors.run_log import Event, read_events
from tests.ray_processes import BIN, wait_until
from tests.simulated.machines import (
    HEALTH_CHECKS,
    RAY_PORT,
    Machine,
    environment_on_machines,
    machines,
    start_registry,
)

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.yaml"
NUM_ROUNDS = 16
SETTINGS = {
    "placement.learner": "SPREAD",
    "placement.samplers": "SPREAD",
    "num_train_problems": 200,
    "sft.num_steps": 4,
    "sft.num_labels": 20,
    "rollout.batch_size": 32,
    "rollout.engine.num_slots": 32,
    "learner.num_rounds": NUM_ROUNDS,
    "learner.groups_per_round": 8,
    "learner.group_size": 4,
    "evaluation.num_problems": 10,
    "evaluation.every_rounds": 8,
    "evaluation.schedules": "[{num_denoise_steps: 3}]",
    "checkpoint_every_rounds": 2,
}
PLACED = """
import json, ray
ray.init(logging_level="ERROR")
from ray.util.state import list_actors
addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
alive = [actor for actor in list_actors(limit=1000, timeout=90) if actor["state"] == "ALIVE"]
print(json.dumps(sorted([actor["class_name"], addresses[actor["node_id"]]] for actor in alive)))
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster on two machines."""

    head: Machine
    other: Machine
    laptop: Machine
    """A machine outside of the cluster."""
    environment: dict[str, str]
    """Environment of a driver on the head."""

    def placed(self) -> dict[str, set[str]]:
        """Return on which machines' addresses each class of actors lives."""
        lines = self.head.run([sys.executable, "-c", PLACED], self.environment, 120).splitlines()
        found: dict[str, set[str]] = {}
        for name, address in json.loads(lines[-1]):
            found.setdefault(name, set()).add(address)
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with machines("head", "other", "laptop") as (head, other, laptop), (tmp_path / "redis.log").open("wb") as log:
        environment = environment_on_machines(tmp_path) | HEALTH_CHECKS
        environment["D1_REDIS_URL"] = start_registry(head, environment, tmp_path, log)
        ray = [str(BIN / "ray"), "start", "--num-cpus=3", "--object-store-memory=100000000"]
        dashboard = ["--include-dashboard=true", f"--dashboard-host={head.address}"]
        head.run([*ray, "--head", f"--port={RAY_PORT}", *dashboard], environment, 120)
        address = f"{head.address}:{RAY_PORT}"
        other.run([*ray, f"--address={address}"], environment, 120)
        yield Cluster(head, other, laptop, environment | {"RAY_ADDRESS": address})


def command(subcommand: str, run_dir: Path, *more: str) -> list[str]:
    """Return the words of `d1 train` or `d1 submit`."""
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    words = [str(BIN / "d1"), subcommand, str(RECIPE), f"runs_dir={run_dir.parent}", f"name={run_dir.name}"]
    return [*words, *settings, *more]


def hide(machine: Machine, directory: Path, environment: dict[str, str]) -> None:
    """Let a machine see an empty directory in place of one that the other machines share."""
    machine.run(["mount", "-t", "tmpfs", "d1", str(directory)], environment, 20)


@contextmanager
def training(cluster: Cluster, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Train on the cluster, with the driver on the head; the test fails if that fails."""
    with (run_dir.parent / "train.log").open("w+b") as output:
        driver = cluster.head.start(command("train", run_dir), cluster.environment, output)
        yield driver
        status = driver.wait(600)
        output.seek(0)
        assert status == 0, output.read().decode()


def of_kind(run_dir: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run_dir) if event["event"] == kind]


def test_a_run_trains_on_two_machines_and_goes_on_without_one(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "pair"
    with training(cluster, run_dir) as driver:
        wait_until(lambda: driver.poll() is not None or len(of_kind(run_dir, "round")) >= 3, "three rounds", 300)
        assert driver.poll() is None, (tmp_path / "train.log").read_text()
        both = {cluster.head.address, cluster.other.address}
        placed = cluster.placed()
        assert placed["SamplerWorker"] == placed["RayTrainWorker"] == both, placed
        assert of_kind(run_dir, "failure") == []
        more = len(of_kind(run_dir, "round")) + 2
        cluster.other.stop()
        wait_until(lambda: driver.poll() is not None or len(of_kind(run_dir, "round")) > more, "more rounds", 400)
    rounds = {event["round"] for event in of_kind(run_dir, "round")}
    assert rounds == set(range(NUM_ROUNDS))
    assert any("learner" in event["what"] for event in of_kind(run_dir, "failure"))


def test_a_machine_that_does_not_see_the_run_directory_is_named(cluster: Cluster, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    hide(cluster.other, runs, cluster.environment)
    with (tmp_path / "train.log").open("w+b") as output:
        driver = cluster.head.start(command("train", runs / "blind"), cluster.environment, output)
        assert driver.wait(300) == 2
        output.seek(0)
        said = output.read().decode()
    assert f"the run directory {runs / 'blind'} does not exist on {cluster.other.address}: " in said, said
    assert "Traceback" not in said


def test_a_run_of_a_cluster_without_a_shared_disk_is_fetched(cluster: Cluster, tmp_path: Path) -> None:
    """The laptop shares nothing with the cluster except a directory that stands for a bucket."""
    runs, bucket = tmp_path / "runs", tmp_path / "bucket"
    runs.mkdir()
    bucket.mkdir()
    hide(cluster.laptop, runs, cluster.environment)
    url = f"file://{bucket}"
    environment = cluster.environment | {"RAY_ADDRESS": f"http://{cluster.head.address}:8265"}
    log = cluster.laptop.run(command("submit", runs / "far", f"checkpoint_url={url}"), environment, 600)
    assert f"d1 runs fetch {url}/far" in log, log
    assert "held-out accuracy after RL" in log, log
    d1 = str(BIN / "d1")
    look = f"cd {runs} && {d1} runs fetch {url}/far && {d1} status far && {d1} sample far 1423324000144130"
    assert cluster.laptop.run(["ls", str(runs)], environment, 20) == ""
    shown = cluster.laptop.run(["sh", "-c", look], environment, 120)
    assert "SFT + RL" in shown, shown
    assert "18 tokens" in shown, shown
