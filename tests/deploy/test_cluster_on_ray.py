"""The cluster of docker-compose.yml as plain processes: a run on two nodes, and loss of the head.

The head keeps its state in Redis (RAY_REDIS_ADDRESS), so a restarted head restores the same cluster.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from actors.registry.registry import Registry
from actors.registry.server import free_port
from actors.run_log import read_events
from benchmarks.service.deployment import Policies, Shape
from tests.announced import latest
from tests.deploy.service.asking import ASK, TOKEN, Asker, call, is_up
from tests.ray_processes import BIN, RECIPE, RayProcesses, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARDS = DEPLOY / "grafana" / "dashboards"
WORKER, HEAD = "worker", "node:__internal_head__"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

NODES = """
import json, ray
ray.init(logging_level="ERROR")
from ray.util.state import list_actors
alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
actors = list_actors(limit=1000, timeout=90)
print(json.dumps({"alive": alive, "actors": [[actor["class_name"], actor["node_id"]] for actor in actors]}))
"""
WITHOUT = """
import sys
from pathlib import Path
import ray
ray.init(logging_level="ERROR", log_to_driver=False)
from actors.machines import machines_without
for directory in sys.argv[1:]:
    print(machines_without(Path(directory)))
"""
# The actors on the worker that export a run's metrics.
NUMBERS = """
import ray
ray.init(logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0.1, resources={"worker": 0.1})
class Numbers:
    def show(self):
        from actors.coordination.reporting.metrics import _GAUGES, RunGauges
        pools = {"samplers": {"away": 0, "busy": 1}}
        RunGauges("pair").show(dict.fromkeys(_GAUGES, 1.0) | {"pools": pools})

numbers = Numbers.options(name="numbers", lifetime="detached").remote()
ray.get(numbers.show.remote(), timeout=180)
"""
TASKS = """
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0.1)
def where():
    return ray.get_runtime_context().get_node_id()

nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
on = lambda node: where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
assert [ray.get(on(node).remote(), timeout=180) for node in nodes] == nodes
print(len(nodes))
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[RayProcesses]:
    cluster = RayProcesses(D1_API_TOKEN=TOKEN)
    yield cluster
    cluster.stop()


@dataclass(frozen=True, slots=True)
class _Service:
    """The service of deploy/k8s: its engine and its ingresses are on the worker, since the head there has no CPUs."""

    processes: RayProcesses
    run_dir: Path
    port: int

    @property
    def url(self) -> str:
        """URL of the service on the worker."""
        return f"http://{self.processes.worker_ip}:{self.port}"

    def deploy(self, num_ingresses: int = 1, *, ingress_on: str = WORKER) -> None:
        """Deploy the service, or the changes to a running one."""
        manifest = yaml.safe_load((DEPLOY / "k8s" / "serve.yaml").read_text(encoding="utf-8"))
        config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
        config["http_options"]["port"] = self.port
        (application,) = config["applications"]
        application["args"] |= {"run_dir": str(self.run_dir), "port": self.port, "num_ingresses": num_ingresses}
        application["args"]["num_engines"] = 1
        application["deployments"] = [
            {"name": name, "ray_actor_options": {"num_cpus": 0.01, "resources": {node: 0.001}}}
            for name, node in (("EngineReplica", WORKER), ("Ingress", ingress_on))
        ]
        self.processes.deploy(config)

    def ask_all_the_time(self) -> Asker:
        """Start two clients."""
        return Asker(self.url, 2, ASK, pause_s=0.1)


@pytest.fixture(scope="module")
def service(processes: RayProcesses, tmp_path_factory: pytest.TempPathFactory) -> _Service:
    shape = Shape(d_model=32, num_layers=1, gen_length=16, block_length=8, steps=8)
    policies = Policies(tmp_path_factory.mktemp("runs") / "tiny", shape, 1)
    deployed = _Service(processes, policies.directory, free_port())
    deployed.deploy()
    wait_until(lambda: _are_new(processes.replicas("d1"), {}, 2), "the service", 300)
    wait_until(lambda: is_up(deployed.url), "an ingress that has found its engine", 180)
    return deployed


def test_the_cluster_has_its_own_network_namespace(processes: RayProcesses) -> None:
    # Interfaces that appear and vanish abort a concurrent browser's requests: net::ERR_NETWORK_CHANGED.
    here, outside = _interfaces("thread-self"), _interfaces(str(os.getppid()))
    assert len(here) == 2
    assert here & outside == {"lo"}


def test_a_submitted_run_uses_both_nodes_and_the_registry_on_redis(processes: RayProcesses, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE + f"runs_dir: {tmp_path}\n")
    environment = processes.environment | {"RAY_ADDRESS": processes.dashboard_url}
    d1 = [str(BIN / "ray"), "job", "submit", "--working-dir", str(tmp_path), "--", str(BIN / "d1")]
    processes.command([*d1, "train", "recipe.yaml"], environment, timeout_s=1800)
    events = read_events(tmp_path / "pair")
    assert [event["round"] for event in events if event["event"] == "round"] == [0, 1]
    assert [event for event in events if event["event"] == "failure"] == []
    found = json.loads(processes.python(NODES))
    assert len(found["alive"]) == 2
    of_the_run = ("SamplerWorker", "GraderWorker", "RayTrainWorker", "WeightStore", "Coordinator")
    placed = {node for name, node in found["actors"] if any(part in name for part in of_the_run)}
    assert placed == set(found["alive"]), found["actors"]
    registry = Registry(processes.registry_url, "pair")
    assert all(registry.version(number) for number in range(4))
    assert registry.snapshot().aliases == {"newest": 3, "base": 1}
    # The checkpoint with the rounds' weights, since a service on another cluster has no weight store.
    newest = latest(registry)
    assert newest is not None
    assert newest.checkpoint == str(tmp_path / "pair" / "checkpoints" / "rl-000002")
    registry.close()


def test_machines_that_do_not_see_a_directory_are_found(processes: RayProcesses, tmp_path: Path) -> None:
    # The worker has a temporary directory of its own.
    of_head = Path(processes.environment["HOME"]) / "of the head"
    of_head.mkdir()
    assert processes.python(WITHOUT, str(tmp_path), str(of_head)).splitlines()[-2:] == [
        "[]",
        f"['{processes.worker_ip}']",
    ]


@pytest.mark.nightly
def test_no_request_fails_during_a_gcs_outage_and_the_cluster_recovers(service: _Service) -> None:
    processes = service.processes
    replicas = processes.replicas("d1")
    asker = service.ask_all_the_time()
    with processes.without_gcs():
        _wait_out(asker)
    wait_until(lambda: _is_whole(processes), "tasks on both nodes", 300)
    # The same processes answer, and Serve's controller works: a new deployment rolls out.
    assert processes.replicas("d1") == replicas
    service.deploy(num_ingresses=2)
    wait_until(lambda: _are_new(processes.replicas("d1"), replicas, 3), "the new replicas alone", 300)
    asker.stop()
    assert [answer for answer in asker.answers if answer[0] != 200] == []


def test_the_nodes_export_the_metrics_of_the_dashboards(service: _Service) -> None:
    assert call(f"{service.url}/v1/completions", ASK)[0] == 200
    service.processes.python(NUMBERS)
    text = "".join(path.read_text(encoding="utf-8") for path in BOARDS.glob("*.json"))
    wanted = set(re.findall(r"\bray_[a-z0-9_]+", text))
    assert len(wanted) > 20
    metrics = service.processes.metrics
    wait_until(lambda: wanted <= metrics(), f"the metrics {sorted(wanted)}", 180)


def test_the_worker_answers_while_the_head_is_down(service: _Service) -> None:
    processes = service.processes
    replicas = processes.replicas("d1")
    asker = service.ask_all_the_time()
    processes.kill_head()
    _wait_out(asker)
    processes.start_head()
    wait_until(lambda: _is_whole(processes), "tasks on both nodes", 300)
    asker.stop()
    assert [answer for answer in asker.answers if answer[0] != 200] == []
    assert processes.replicas("d1") == replicas


def test_an_ingress_reaches_engines_on_another_node(service: _Service) -> None:
    service.deploy(num_ingresses=2, ingress_on=HEAD)
    url = f"http://{service.processes.head_ip}:{service.port}"
    wait_until(lambda: is_up(url), "the ingress on the head", 300)
    assert call(f"{url}/v1/completions", ASK)[0] == 200


def _interfaces(process: str) -> set[str]:
    """Return the network interfaces that a process sees."""
    lines = Path("/proc", process, "net", "dev").read_text().splitlines()[2:]
    return {line.split(":")[0].strip() for line in lines}


def _wait_out(asker: Asker) -> None:
    """Wait for at least three seconds of an outage, until both clients have new answers."""
    before = len(asker.answers)
    time.sleep(3)
    wait_until(lambda: len(asker.answers) > before + 4, "answers during the outage", 180)


def _are_new(replicas: dict[str, str], old: dict[str, str], count: int) -> bool:
    return len(replicas) == count and set(replicas.values()) == {"RUNNING"} and replicas.keys().isdisjoint(old)


def _is_whole(processes: RayProcesses) -> bool:
    try:
        return processes.python(TASKS, timeout_s=180).split() == ["2"]
    except AssertionError:
        return False
