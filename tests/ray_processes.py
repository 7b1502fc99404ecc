"""A Ray cluster of plain processes, laid out like docker-compose.yml.

It has Redis, a head that keeps its state there, and a worker. Each node has its own network namespace, like a
container. Otherwise a browser opened by another test would abort its requests (net::ERR_NETWORK_CHANGED) whenever an
interface appeared or disappeared. The thread that starts the cluster is on the head's network until the cluster ends.
The worker also has its own temporary directory: raylets that share one delete each other's working directories. This
needs root and iproute2; tests skip without them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.registry.server import free_port
from deploy.orphans import descendants
from deploy.ray_session import ignoring_resource_warnings
from tests.redis_server import DebianRedis

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
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
placement: {learner: SPREAD}
evaluation: {num_problems: 10}
control: {enabled: false}
"""
"""A run of seconds with a learner worker on each of two nodes."""
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0
_CLONE_NEWNET = 0x40000000  # <sched.h>


def shut_down_ray() -> None:
    """Shut down this process's Ray, and kill the workers that outlive it.

    On a busy machine Ray does not wait for all processes that it kills. Their handles are collected here, so that no
    later ResourceWarning reports them as still running.
    """
    workers = {
        worker
        for pid in descendants(os.getpid())
        if _words(pid)[:1] and _words(pid)[0].endswith("/raylet")
        for worker in descendants(pid)
    }
    with ignoring_resource_warnings():
        ray.shutdown()
        gc.collect()
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


class RayProcesses:
    """The cluster. The caller must call `stop` in the thread that created it, also after an error.

    Until then, that thread and the processes it starts are in the head's network namespace, with its own loopback.
    """

    def __init__(self, *, head_cpus: int = 1, **environment: str) -> None:
        """Start Redis, head and worker. The worker has one logical CPU, the resource `worker`, and the label
        `machine=worker`.

        Args:
            head_cpus: logical CPUs of the head.
            environment: additional environment variables of the nodes.
        """
        self._num_cpus = {"head": head_cpus, "worker": 1}
        self._mark = secrets.token_hex(3)
        # Short: the paths of Ray's sockets lie below it and are limited to 107 characters.
        self._directory = Path(tempfile.mkdtemp(prefix="d1r-", dir="/tmp"))
        self._network_before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._redis: DebianRedis | None = None
        self._gcs: subprocess.Popen[bytes] | None = None
        password = secrets.token_hex(16)
        (self._directory / "redis").mkdir()
        try:
            self.head_ip, self.worker_ip = self._make_networks()
            with Path("/run/netns", self._network("head")).open() as network:
                _enter_network(network.fileno())
            self._redis = DebianRedis(free_port(), password, self._directory / "redis", host=self.head_ip)
            self.registry_url = self._redis.url
            self.port, self.dashboard_port = free_port(), free_port()
            self.environment = {
                "HOME": str(self._directory),
                "PATH": f"{BIN}:/usr/bin:/bin:/usr/sbin:/sbin",
                "PYTHONPATH": str(ROOT),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_REDIS_ADDRESS": f"{self.head_ip}:{self._redis.port}",
                "RAY_external_storage_namespace": "d1-test",
                "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
                # The head's dashboard keeps two CPUs busy while its GCS is down, and here the worker shares these CPUs.
                "RAY_worker_niceness": "0",
                # Prestarted workers would lack the environment of a run or a service.
                "RAY_prestart_worker_first_driver": "0",
                "D1_REDIS_URL": self.registry_url,
                **environment,
            }
            self._metrics_port = free_port()
            ports = [f"--ray-client-server-port={free_port()}", f"--metrics-export-port={self._metrics_port}"]
            ports += [f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-port={self.dashboard_port}"]
            self._head_command = [
                *("--head", f"--port={self.port}", f"--node-ip-address={self.head_ip}", "--dashboard-host=127.0.0.1"),
                *(f"--temp-dir={self._directory}", f"--redis-password={password}", *ports),
            ]
            self.start_head()
            address = f"--address={self.head_ip}:{self.port}"
            worker = [address, f"--node-ip-address={self.worker_ip}", '--resources={"worker": 1}']
            worker += [f"--metrics-export-port={self._metrics_port}", "--labels=machine=worker"]
            own = ["sh", "-c", f'mount -t tmpfs d1 {self._directory} && exec "$@"', "sh"]
            self._ray_start("worker", worker, ["ip", "netns", "exec", self._network("worker"), *own])
        except BaseException:
            self.stop()
            raise

    @property
    def dashboard_url(self) -> str:
        """The address to submit jobs to."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start_head(self) -> None:
        """Start the head, or restart it after it was killed, as a supervisor would."""
        self._ray_start("head", self._head_command, [])

    def kill_head(self) -> None:
        """Kill every process of the head node, as the end of its container does."""
        self._kill(self._processes("head"))

    def kill_worker(self) -> None:
        """Kill every process of the worker node, as the loss of its machine does."""
        self._kill(self._processes("worker"))

    @contextmanager
    def without_gcs(self) -> Iterator[None]:
        """Kill the GCS process, and start the same one again on exit."""
        (pid,) = [pid for pid in self._processes("head") if _words(pid)[:1] and "gcs_server" in _words(pid)[0]]
        words, environment = _words(pid), _environment(pid)
        self._kill([pid])
        try:
            yield
        finally:
            with (self._directory / "gcs.log").open("wb") as log:
                self._gcs = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)

    def metrics(self) -> set[str]:
        """Return the names of the metrics that both nodes export to Prometheus."""
        names: set[str] = set()
        for address in (self.head_ip, self.worker_ip):
            with urllib.request.urlopen(f"http://{address}:{self._metrics_port}/metrics", timeout=20) as response:
                lines = response.read().decode().splitlines()
            names |= {re.split(r"[ {]", line)[0] for line in lines if line and not line.startswith("#")}
        return names

    def python(self, script: str, *arguments: str, timeout_s: float = 180) -> str:
        """Run a driver on the head and return its output. The test fails if the driver fails."""
        environment = self.environment | {"RAY_ADDRESS": f"{self.head_ip}:{self.port}"}
        return self.command([sys.executable, "-c", script, *arguments], environment, timeout_s)

    def command(self, words: list[str], environment: dict[str, str], timeout_s: float) -> str:
        """Run a command and return its output. The test fails if the command fails."""
        done = subprocess.run(
            words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{words[:3]} failed\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def deploy(self, config: object) -> None:
        """Deploy applications on Ray Serve over HTTP, as KubeRay does, with the content of a `serve deploy` file."""
        self._ask_serve("PUT", config)

    def replicas(self, application: str) -> dict[str, str]:
        """Return the state of each replica of a Ray Serve application, by replica id."""
        deployments = self._ask_serve("GET")["applications"][application]["deployments"].values()
        return {one["replica_id"]: one["state"] for deployment in deployments for one in deployment["replicas"]}

    def stop(self) -> None:
        """Kill every process of the cluster, and delete its files."""
        self._kill([pid for node in ("head", "worker") for pid in self._processes(node)])
        if self._gcs is not None:
            self._gcs.wait(_STOP_TIMEOUT_S)
        if self._redis is not None:
            self._redis.stop()
        _enter_network(self._network_before)
        os.close(self._network_before)
        for node in ("worker", "head"):
            delete = ["ip", "netns", "del", self._network(node)]
            subprocess.run(delete, check=False, capture_output=True, timeout=20)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _ask_serve(self, method: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"{self.dashboard_url}/api/serve/applications/",
            None if body is None else json.dumps(body).encode(),
            method=method,
        )
        request.add_header("Authorization", f"Bearer {self.environment['RAY_AUTH_TOKEN']}")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read() or "null")

    def _network(self, node: str) -> str:
        return f"d1-{self._mark}-{node}"

    def _make_networks(self) -> tuple[str, str]:
        """Make a network namespace for each node and a veth pair between them; return the addresses of its two ends."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("needs root and iproute2, for a network namespace")
        head, worker = self._network("head"), self._network("worker")
        outgoing, incoming = self._interface("head"), self._interface("worker")
        commands = [
            f"ip netns add {head}",
            f"ip netns add {worker}",
            f"ip -n {head} link add {outgoing} type veth peer name {incoming} netns {worker}",
            f"ip -n {head} addr add 10.231.0.1/30 dev {outgoing}",
            f"ip -n {worker} addr add 10.231.0.2/30 dev {incoming}",
        ]
        for network, interface in ((head, outgoing), (worker, incoming)):
            commands += [f"ip -n {network} link set {interface} up", f"ip -n {network} link set lo up"]
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=20, check=False)
            if done.returncode != 0:
                pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")
        return "10.231.0.1", "10.231.0.2"

    def _interface(self, node: str) -> str:
        return f"d1{node[0]}{self._mark}"

    def _ray_start(self, node: str, arguments: list[str], prefix: list[str]) -> None:
        common = [f"--num-cpus={self._num_cpus[node]}", "--object-store-memory=100000000", "--disable-usage-stats"]
        own = {"D1_TEST_NODE": f"{self._mark}-{node}"}
        words = [*prefix, sys.executable, str(BIN / "ray"), "start", *arguments, *common]

        def start() -> None:
            # Ray's record that a cluster runs on this machine: with it, and with the worker's processes in sight, Ray
            # refuses to start a head. In containers the head would see neither.
            (self._directory / "ray_current_cluster").unlink(missing_ok=True)
            self.command(words, self.environment | own, _START_TIMEOUT_S)

        try:
            start()
        except (AssertionError, subprocess.TimeoutExpired):
            # Ray gives a node 30 s to start, which a busy machine may exceed. A supervisor would retry.
            self._kill(self._processes(node))
            start()

    def _processes(self, node: str) -> list[int]:
        """Return the processes of a node, found by the environment variable that they all inherit."""
        mark = f"{self._mark}-{node}"
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if _environment(pid).get("D1_TEST_NODE") == mark]

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_until(lambda: not any(_environment(pid) for pid in pids), "processes to end", _STOP_TIMEOUT_S)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait until `condition` holds. The test fails when it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)


def _enter_network(namespace: int) -> None:
    """Move this thread, and the processes it starts from now on, into the network namespace of an open file."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return []


def _environment(pid: int) -> dict[str, str]:
    """Return a process's environment variables; none once it has ended."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
