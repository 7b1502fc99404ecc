"""The service end to end: Ray, Serve, registry and weight store, under load while the policy changes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest
import ray
import redis

from actors import NAMESPACE
from actors.registry.registry import Registry
from actors.registry.server import registry_url
from actors.weights.store import WeightStore, store_name
from actors.weights.tensors import make_manifest, put
from benchmarks.service import faults, soak
from benchmarks.service.deployment import ROLES, Deployed, Policies, Publisher, Shape, processes
from benchmarks.service.load import Judge
from deploy.errors import UserError
from deploy.orphans import descendants
from deploy.requests.body import CompletionRequest
from deploy.service.on_ray.launch import deploy_source, scale_engines
from deploy.service.source import Address, Source
from tests.deploy.service.asking import ASK, TOKEN, Asker, call, is_up, wait_until
from tests.ray_processes import shut_down_ray

NEWEST = 4
LONG = ASK | {"diffusion": {"gen_length": 40, "block_length": 4, "steps": 40}}
FAULTS = faults.Plan(num_swaps=5, num_kills=2, num_parts=1, rate=12.0, swap_every_s=0.8, kill_after_s=0.8)
SOAK = soak.Plan(minutes=1.0, num_clients=3, look_every_s=0.5, swap_every_s=2.0)
MOST_GROWTH_MIB = 24.0
INGRESS, ENGINE = ROLES["ingress"], ROLES["engine"]
BROKEN = {"URLError", "ConnectionResetError", "RemoteDisconnected", "IncompleteRead"}
"""What a client finds where nobody listens, or does not any more."""


def alive(pids):
    """Those of `pids` that still run, whoever their parent is by now."""
    return pids & descendants(1)


def listening(pid):
    """What a process calls itself, and the addresses on which it listens."""
    try:
        process = psutil.Process(pid)
        found, name = process.net_connections("tcp"), " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "", []
    return name, [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]


def publish(store, version, weights):
    ray.get(store.publish.remote(make_manifest(version, weights), put(weights)), timeout=60)


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_no_request_is_dropped_while_versions_change(
    serve_cluster, run_dir, service, make_model, make_sampler, make_policy, add_checkpoint, free_port
):
    # A job deploys the service and ends.
    script = "import sys; from pathlib import Path; from deploy.service.on_ray.launch import serve_run\n"
    script += "serve_run(Path(sys.argv[1]), '127.0.0.1', int(sys.argv[2]))"
    job = [sys.executable, "-c", script, str(run_dir), str(free_port)]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(job, env=environment, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    url = f"http://127.0.0.1:{free_port}"
    assert f"Serving tiny at {url}; the token is in D1_API_TOKEN" in done.stdout
    assert TOKEN not in done.stdout
    assert call(f"{url}/v1/policy", token="wrong")[0] == 401
    assert call(f"{url}/health")[1] == {
        "status": "ok",
        "policy_version": 1,
        "registry_reachable": True,
        "follower_errors": 0,
    }

    # Versions come while clients ask.
    store = ray.remote(WeightStore).options(name=store_name("tiny"), namespace=NAMESPACE, num_cpus=0).remote(2)
    registry = Registry(registry_url(), "tiny")
    asker = Asker(url, 3)
    for version in range(2, NEWEST + 1):
        num_before = len(asker.answers)
        wait_until(lambda n=num_before: len(asker.answers) > n + 10, "answers")
        publish(store, version, make_model(version).state_dict())
        registry.announce(make_policy(version, weight_store=store_name("tiny")))
        wait_until(lambda v=version: call(f"{url}/v1/policy")[1]["policy_version"] == v, f"version {version}")
    num_before = len(asker.answers)
    assert registry.score(NEWEST, 3, 4)
    wait_until(lambda: call(f"{url}/v1/policy")[1]["score"], "the score")
    wait_until(lambda: len(asker.answers) > num_before + 10, "answers of the newest version")
    asker.stop()
    check_answers(asker.answers, service, make_sampler)
    policy = call(f"{url}/v1/policy")[1]
    assert (policy["score"]["policy_version"], policy["score"]["accuracy"]) == (NEWEST, 0.75)
    assert (policy["round"], policy["num_swaps"], policy["last_error"]) == (NEWEST - 1, NEWEST - 1, None)

    # The registry's server dies: the service answers on, and follows again once it is back.
    asker = Asker(url, 1)
    shut_down(registry_url())
    announced = make_policy(5, checkpoint=str(add_checkpoint(run_dir, 5)))
    wait_until(lambda: try_to_announce(registry, announced), "the registry's return")
    wait_until(lambda: call(f"{url}/health")[1]["policy_version"] == 5, "version 5")
    asker.stop()
    assert {status for status, _ in asker.answers} == {200}
    assert call(f"{url}/health")[1]["registry_reachable"]
    registry.close()

    # Deployed again, as by a resumed run, the service has no gap. It cannot move to another port.
    asker = Asker(url, 1)
    source = Source(directory=str(run_dir), is_run=True, registry_url=registry_url())
    assert deploy_source(source, Address(host="127.0.0.1", port=free_port), 1) == url
    wait_until(lambda: call(f"{url}/v1/policy")[1]["num_swaps"] == 0, "the new replica")
    asker.stop()
    assert {status for status, _ in asker.answers} == {200}
    assert asker.longest_s < 10, "requests waited for the new replica to start"
    with pytest.raises(UserError, match=f"already listens on 127.0.0.1:{free_port}, and Ray Serve cannot"):
        deploy_source(source, Address(host="127.0.0.1", port=free_port + 1), 1)

    assert statuses_while_engines_come_and_go(url, source, serve_cluster.dashboard_url) == {200}

    assert_nothing_stays()


def assert_nothing_stays():
    """But what Python keeps for whoever has used multiprocessing in this process before: two servers of its own."""
    kept = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    started = descendants(os.getpid()) - kept
    assert len(started) > 5
    shut_down_ray()
    wait_until(lambda: not alive(started), "the processes to end", 90)


def statuses_while_engines_come_and_go(url, source, dashboard_url):
    """From one to two and back, while clients ask."""
    asker = Asker(url, 2)
    scale_engines(source, 2, dashboard_url)
    wait_until(lambda: len(processes(ENGINE)) == 2, "another engine")
    num_before = len(asker.answers)
    wait_until(lambda: len(asker.answers) > num_before + 10, "answers of both")
    scale_engines(source, 1, dashboard_url)
    wait_until(lambda: len(processes(ENGINE)) == 1, "one engine to go")
    asker.stop()
    return {status for status, _ in asker.answers}


def check_answers(answers, service, make_sampler):
    """All answered; each by the one version that it names; the last by the newest."""
    assert {status for status, _ in answers} == {200}, [body for status, body in answers if status != 200][:3]
    assert {body["policy_version"] for _, body in answers} == set(range(1, NEWEST + 1))
    assert all(body["policy_version"] == NEWEST for _, body in answers[-5:])
    expected = {version: text_of(service, make_sampler(version), ASK) for version in range(1, NEWEST + 1)}
    assert len(set(expected.values())) == NEWEST
    assert all(body["choices"][0]["text"] == expected[body["policy_version"]] for _, body in answers)


def text_of(service, sampler, ask):
    """What a sampler by itself says to a body."""
    plan = service.planner.plan(CompletionRequest(**ask))
    completion = sampler.generate(plan.requests)[0]
    return service.codec.decode(completion.token_ids[: completion.num_tokens].tolist())


def shut_down(url):
    client = redis.Redis.from_url(url, retry=None)
    client.shutdown(nosave=True)
    client.close()


def try_to_announce(registry, policy):
    try:
        registry.announce(policy)
    except ConnectionError:
        return False
    return True


@pytest.fixture
def deployed(serve_cluster, tmp_path, free_port):
    """A service of two engines, whose policy can be changed."""
    shape = Shape(d_model=32, num_layers=1, gen_length=40, block_length=4, steps=40)
    policies = Policies(tmp_path / "tiny", shape, 2)
    source = Source(directory=str(policies.directory), is_run=True, registry_url=registry_url())
    url = deploy_source(source, Address(host="127.0.0.1", port=free_port), policies.num_replicas)
    registry = Registry(registry_url(), "tiny")
    yield Deployed(url=url, policies=policies, publisher=Publisher(policies, registry))
    registry.close()


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_memory_does_not_grow_under_hang_ups_bad_requests_and_new_versions(deployed):
    soaked = asyncio.run(soak.soak(deployed, SOAK))
    assert soaked.lost == []
    assert min(soaked.counts[kind] for kind in ("answers", "hang-ups", "bad requests", "views")) > 8
    assert [row for row in soak.growth(soaked.looks) if row["last"] - row["middle"] > MOST_GROWTH_MIB] == []


@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_no_answer_is_lost_while_engines_die_and_versions_change(deployed):
    url, policies = deployed.url, deployed.policies
    outcome = asyncio.run(faults.disturb(deployed, FAULTS, compares=False))
    found = Judge(policies).judge(outcome.disturbed)
    assert found.is_good, found
    assert (outcome.num_swaps, len(outcome.kills_s)) == (FAULTS.num_swaps, FAULTS.num_kills)
    versions = {version for answer in outcome.disturbed for version in answer.versions}
    assert len(versions) > 3, "the load should see the versions change"
    kills_s = [killed_s for killed_s, _ in outcome.kills_s]
    hit = [one for one in outcome.disturbed if any(one.began_s < killed_s < one.ended_s for killed_s in kills_s)]
    assert hit, "a kill should strike answers under way"

    # A client that goes away frees its slots long before its answer would be done, at most of five tries.
    assert sum(2 * slots_taken_s(url, hangs_up=True) < slots_taken_s(url, hangs_up=False) for _ in range(5)) > 2

    # An ingress that dies may fail the requests under way, in any of these ways. Later ones wait for its successor.
    asker = Asker(url, 2)
    wait_until(lambda: len(asker.answers) > 2, "answers")
    (victim,) = processes(INGRESS)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: processes(INGRESS) - {victim} and is_up(url), "an ingress", 240)
    num_before = len(asker.answers)
    wait_until(lambda: len(asker.answers) > num_before + 4, "answers of the new one")
    asker.stop()
    others = {status for status, _ in asker.answers} - {200}
    assert others <= BROKEN | {"JSONDecodeError"}, others


def slots_taken_s(url, *, hangs_up):
    """For how long a request for many completions takes slots, whose client hangs up at the first line or reads on."""
    wait_until(lambda: running(url) == 0, "nothing to run")
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(LONG | {"n": 32, "stream": True}).encode())
    request.add_header("Authorization", f"Bearer {TOKEN}")
    request.add_header("Content-Type", "application/json")
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=180) as response:
        response.readline() if hangs_up else response.read()
    wait_until(lambda: running(url) == 0, "its slots to be free")
    return time.monotonic() - began


def statuses_while_the_only_engine_is_replaced(url):
    """What clients get who ask all the time, until its successor answers."""
    asker = Asker(url, 2)
    wait_until(lambda: len(asker.answers) > 2, "answers")
    (victim,) = processes(ENGINE)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: processes(ENGINE) - {victim}, "its successor", 240)
    num_before = len(asker.answers)
    wait_until(lambda: len(asker.answers) > num_before + 4, "its answers")
    asker.stop()
    return {status for status, _ in asker.answers}


def running(url):
    """Completions in engines, by the gauges of the service."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=180) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(r"^d1_choices_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)))


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_single_checkpoint_is_served_and_drains_on_sigterm(run_dir, free_port, tmp_path):
    checkpoint = run_dir / "checkpoints" / "sft-1"
    environment = os.environ | {"D1_API_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    command = "from deploy.cli import main; main()"
    words = [sys.executable, "-c", command, "serve", str(checkpoint), "--port", str(free_port)]
    output = tmp_path / "output"
    with output.open("w") as file:
        served = subprocess.Popen(words, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{free_port}"
        wait_until(lambda: is_up(url) or served.poll() is not None, "the service", 300)
        assert served.poll() is None, output.read_text()
        status, body = call(f"{url}/v1/completions", ASK)
        assert (status, body["policy_version"]) == (200, 1)
        # Ray's own processes too: GCS, raylet, dashboard, metrics. Serve gives each replica a port for calls of other
        # deployments, on all addresses; it needs Ray's token.
        found = [listening(pid) for pid in (served.pid, *descendants(served.pid))]
        hosts = {host for name, hosts in found for host in hosts if not name.startswith("ray::ServeReplica")}
        assert sum(bool(hosts) for _, hosts in found) > 5
        assert hosts <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert all(hosts.count("::") <= 1 for _, hosts in found)

        statuses_of_outage = statuses_while_the_only_engine_is_replaced(url)

        # Long enough to be under way: what began is finished, what comes later is refused in our format.
        slow = ASK | {"n": 32, "diffusion": {"gen_length": 40, "block_length": 1, "steps": 40}}
        # Almost without a pause: the end of what is under way may be a tenth of a second away.
        asker = Asker(url, 4, slow, pause_s=0.01)
        wait_until(lambda: len(asker.answers) > 4, "answers")
        served.send_signal(signal.SIGTERM)
        served.wait(240)
        asker.stop()
    finally:
        processes = descendants(served.pid)
        served.kill()
        served.wait(20)
        for pid in alive(processes):
            os.kill(pid, signal.SIGKILL)
    assert statuses_of_outage == {200}
    statuses = [status for status, _ in asker.answers]
    assert set(statuses) <= {200, 503} | BROKEN, set(statuses)
    assert statuses.count(503) >= 1
    refused = [body for status, body in asker.answers if status == 503]
    assert all(body["error"]["code"] == "unavailable" for body in refused)
