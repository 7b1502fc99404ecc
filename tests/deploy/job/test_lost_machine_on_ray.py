"""Loss of a machine for good: the learner says what it waits for, and goes on with fewer workers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.run_log import Event, read_events
from tests.ray_processes import BIN, RECIPE, RayProcesses, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1800)]

OVERRIDES = (
    "learner.min_workers=1",
    "learner.resource_timeout_s=40",
    "learner.num_rounds=60",
    "learner.lr=0.001",
    "checkpoint_every_rounds=1",
    "num_checkpoints_kept=100",
    # Equal rewards have no gradient: the policy solves no sum, and some of its completions are shorter than others.
    "reward.terms={length: {kind: length_penalty, buffer_tokens: 6}}",
)
# On the head there is then room for everything except one learner worker: 0.7 CPUs for the other actors, 0.4 for each.
OCCUPY = """
import ray
ray.init(logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0.6)
class Occupant:
    def is_up(self):
        return True

occupant = Occupant.options(
    name="occupant", lifetime="detached", label_selector={"machine": "!worker"}
).remote()
ray.get(occupant.is_up.remote(), timeout=180)
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[RayProcesses]:
    cluster = RayProcesses(head_cpus=2)
    yield cluster
    cluster.stop()


def _numbers(events: list[Event]) -> dict[int, dict[str, Any]]:
    """What each round computed, from the last event of each."""
    names = ("loss", "reward", "grad_norm", "policy_version")
    return {event["round"]: {name: event[name] for name in names} for event in events if event["event"] == "round"}


def _said(run_dir: Path) -> list[str]:
    return [event["what"] for event in read_events(run_dir) if event["event"] == "failure"]


def test_a_run_goes_on_with_fewer_workers_and_equals_a_resumed_run(processes: RayProcesses, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE + f"runs_dir: {tmp_path}\n")
    environment = processes.environment | {"RAY_ADDRESS": f"{processes.head_ip}:{processes.port}"}
    processes.python(OCCUPY, timeout_s=300)
    train = [str(BIN / "d1"), "train", str(tmp_path / "recipe.yaml"), *OVERRIDES]
    run_dir = tmp_path / "pair"
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(train, env=environment, stdout=output, stderr=output)
        wait_until(lambda: (run_dir / "checkpoints" / "rl-000002").exists() or run.poll() is not None, "rounds", 900)
        processes.kill_worker()
        assert run.wait(1200) == 0, (tmp_path / "output").read_text()
    said = _said(run_dir)
    assert any(
        re.match(r"the learner waits for 0\.\d+ more CPUs? of 0\.8; after 40 s it goes on with", one) for one in said
    )
    assert "the learner group goes on with 1 of 2 workers" in said, said
    restarted = said.index("the learner group goes on with 1 of 2 workers") + 1
    (first,) = re.findall(r"the learner group restarted from checkpoint rl-(\d+)", " ".join(said[restarted:]))
    # A run that is resumed from the same checkpoint on one worker.
    resumed = shutil.copytree(run_dir, tmp_path / "resumed")
    for checkpoint in (resumed / "checkpoints").glob("rl-*"):
        if checkpoint.name > f"rl-{first}":
            shutil.rmtree(checkpoint)
    before = len(read_events(resumed))
    processes.command([*train, "name=resumed", "--resume", "learner.num_workers=1"], environment, timeout_s=1200)
    after = _numbers(read_events(resumed)[before:])
    assert after == {index: one for index, one in _numbers(read_events(run_dir)).items() if index >= int(first)}
    assert sum(one["grad_norm"] > 0 for one in after.values()) > 10
    name = "checkpoints/rl-000060/model.safetensors"
    assert (resumed / name).read_bytes() == (run_dir / name).read_bytes()
