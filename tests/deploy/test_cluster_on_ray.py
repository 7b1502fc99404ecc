"""The cluster of docker-compose.yml as plain processes: a run on two nodes, and what the loss of the head does.

The head keeps its state in Redis (RAY_REDIS_ADDRESS), so whoever restarts it gets the same cluster back.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.registry import Registry
from actors.run_log import read_events
from deploy.machine import free_port
from tests.ray_processes import BIN, RayProcesses, wait_until

BOARDS = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

RECIPE = """
name: pair
task: {name: sums}
num_train_problems: 40
model: {d_model: 16, num_layers: 1, num_heads: 2, mlp_hidden_size: 16}
sft: {num_labels: 10, num_steps: 2, batch_size: 8}
rollout:
  num_samplers: 1
  batch_size: 16
  max_prompt_tokens: 12
  sampling: {gen_length: 6, block_length: 3, num_denoise_steps: 2, temperature: 1.0}
grading: {num_graders: 1}
learner: {num_workers: 2, num_rounds: 2, groups_per_round: 8, group_size: 4, inner_updates: 1}
evaluation: {num_problems: 10}
control: {enabled: false}
"""
NODES = """
import json, ray
ray.init(logging_level="ERROR")
from ray.util.state import list_actors
alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
actors = list_actors(limit=1000, timeout=30)
print(json.dumps({"alive": alive, "actors": [[actor["class_name"], actor["node_id"]] for actor in actors]}))
"""
# Replicas on the worker, as in deploy/k8s, where the head has no CPUs; a proxy on each node that has one.
SERVE = """
import sys, ray
from ray import serve
ray.init(logging_level="ERROR", log_to_driver=False)
host, port, version = sys.argv[1:]

@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1, "resources": {"worker": 0.1}})
class Probe:
    def __init__(self, version):
        self.version = version
    def __call__(self, request):
        return {"version": self.version}

client = serve.context._get_global_client(raise_if_no_controller_running=False)
if client is not None and client.http_config.port != int(port):
    serve.shutdown()
serve.start(proxy_location="EveryNode", http_options={"host": host, "port": int(port)})
serve.run(Probe.bind(version), name="probe", route_prefix="/")
"""
# What exports numbers of a run and of a service, on the worker.
NUMBERS = """
import sys, ray
from ray import serve
ray.init(logging_level="ERROR", log_to_driver=False)

@serve.deployment(ray_actor_options={"num_cpus": 0.1, "resources": {"worker": 0.1}})
class Numbers:
    def __init__(self):
        from actors.metrics import _GAUGES, RunGauges
        from deploy.service.ray_metrics import EngineMetrics, RequestMetrics
        requests = RequestMetrics("numbers")
        requests.num_open_is(1)
        requests.first_byte("/v1/completions", 0.1)
        requests.answered("/v1/completions", 200, 0.2)
        EngineMetrics("numbers", "first").show(num_running=1, num_waiting=0, num_swaps=0, version=1)
        pools = {"samplers": {"away": 0, "busy": 1}}
        RunGauges("pair").show(dict.fromkeys(_GAUGES, 1.0) | {"pools": pools})

serve.start(proxy_location="Disabled")
serve.run(Numbers.bind(), name="numbers", route_prefix=None)
"""
COUNTER = """
import sys, ray
ray.init(logging_level="ERROR", namespace="test", log_to_driver=False)

@ray.remote(num_cpus=0.1, resources={"worker": 0.1}, max_restarts=0)
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count

counter = Counter.options(name="counter", lifetime="detached", get_if_exists=True).remote()
print(ray.get(counter.add.remote(), timeout=60))
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
assert [ray.get(on(node).remote(), timeout=60) for node in nodes] == nodes
print(len(nodes))
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[RayProcesses]:
    cluster = RayProcesses()
    yield cluster
    cluster.stop()


def test_a_submitted_run_uses_both_nodes_and_the_registry_on_redis(processes: RayProcesses, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE + f"runs_dir: {tmp_path}\n")
    environment = processes.environment | {"RAY_ADDRESS": processes.dashboard_url}
    d1 = [str(BIN / "ray"), "job", "submit", "--working-dir", str(tmp_path), "--", str(BIN / "d1")]
    processes.command([*d1, "train", "recipe.yaml"], environment, timeout_s=240)
    events = read_events(tmp_path / "pair")
    assert [event["round"] for event in events if event["event"] == "round"] == [0, 1]
    assert [event for event in events if event["event"] == "failure"] == []
    found = json.loads(processes.python(NODES))
    assert len(found["alive"]) == 2
    of_the_run = ("SamplerWorker", "GraderWorker", "RayTrainWorker", "WeightStore", "Coordinator")
    placed = {node for name, node in found["actors"] if any(part in name for part in of_the_run)}
    assert placed == set(found["alive"]), found["actors"]
    registry = Registry(processes.registry_url, "pair")
    assert [policy.version for policy in registry.versions()] == [0, 1, 2, 3]
    assert registry.aliases() == {"newest": 3, "base": 1}
    # Where the rounds' weights lie: a service on another cluster has no weight store.
    newest = registry.latest()
    assert newest is not None
    assert newest.checkpoint == str(tmp_path / "pair" / "checkpoints" / "rl-000002")
    registry.close()


def test_no_request_fails_while_the_gcs_is_away_and_the_cluster_is_whole_again(processes: RayProcesses) -> None:
    port = free_port()
    url = _serve(processes, port, "1")
    assert processes.python(COUNTER).split() == ["1"]
    with _Asking(url) as asking:
        processes.restart_gcs(outage_s=3)
        wait_until(lambda: _is_whole(processes), "tasks on both nodes", 90)
    assert asking.failures == []
    assert asking.num_answers > 30
    # Its actors kept their state, and Serve's controller can act: a new version rolls out.
    assert processes.python(COUNTER).split() == ["2"]
    _serve(processes, port, "2")


def test_the_nodes_export_what_the_dashboards_ask_for(processes: RayProcesses) -> None:
    processes.python(NUMBERS)
    text = "".join(path.read_text(encoding="utf-8") for path in BOARDS.glob("*.json"))
    wanted = set(re.findall(r"\bray_[a-z0-9_]+", text))
    assert len(wanted) > 20
    wait_until(lambda: wanted <= processes.metrics(), f"the metrics {sorted(wanted)}", 60)


def test_the_worker_answers_while_the_head_is_away(processes: RayProcesses) -> None:
    url = _serve(processes, free_port(), "1")
    count = int(processes.python(COUNTER))
    with _Asking(url) as asking:
        processes.kill_head()
        time.sleep(3)
        processes.start_head()
        wait_until(lambda: _is_whole(processes), "tasks on both nodes", 90)
    assert asking.failures == []
    assert asking.num_answers > 30
    assert int(processes.python(COUNTER)) == count + 1


def _serve(processes: RayProcesses, port: int, version: str) -> str:
    """Deploy the probe and wait until the worker's proxy answers from that version; its address there."""
    processes.python(SERVE, "0.0.0.0", str(port), version)
    url = f"http://{processes.worker_ip}:{port}/"
    wait_until(lambda: _answer(url) == version, f"answers of version {version}", 60)
    return url


class _Asking:
    """Two clients that ask all the time; what did not come back right is a failure."""

    def __init__(self, url: str) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self._url = url
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(2)]

    def __enter__(self) -> _Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        while not self._ended.wait(0.05):
            try:
                version = _answer(self._url)
                self.num_answers += 1
            except OSError as error:
                self.failures.append(str(error))
            else:
                if version not in ("1", "2"):
                    self.failures.append(version)


def _answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(json.load(response)["version"])


def _is_whole(processes: RayProcesses) -> bool:
    try:
        return processes.python(TASKS, timeout_s=60).split() == ["2"]
    except AssertionError:
        return False
