"""Pinning on Ray: a pinned version is served by every engine, and by engines that start later."""

import os
import signal
import urllib.request

import pytest

from actors.registry.server import registry_url
from actors.run_log import append_event
from benchmarks.service.deployment import processes
from deploy.cli import policy
from deploy.service.on_ray.launch import deploy_source
from deploy.service.source import Address, Source
from tests.deploy.service.asking import ASK, TOKEN, Asker, call, wait_until


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_a_pinned_version_stays_when_an_engine_dies(serve_cluster, run_dir, add_checkpoint, unused_port):
    from ray import serve

    add_checkpoint(run_dir, 2, round_index=1)
    append_event(run_dir, "run", name="tiny")
    source = Source(directory=str(run_dir), is_run=True, registry_url=registry_url())
    url = deploy_source(source, Address(host="127.0.0.1", port=unused_port()), 2, num_gpus=0)

    def serving():
        engines = serve.get_deployment_handle("EngineReplica", app_name=f"d1-{source.name}")
        return [state.policy.version for state in engines.broadcast("state").results(timeout_s=10)]

    wait_until(lambda: serving() == [2, 2], "both engines")
    policy.pin(str(run_dir), 1, why="it adds well")
    wait_until(lambda: call(f"{url}/v1/policy")[1]["pinned"] == 1 and serving() == [1, 1], "the pin")
    body = call(f"{url}/v1/policy")[1]
    assert (body["policy_version"], body["lag"]) == (1, {"published": 2, "behind": 1})
    asker = Asker(url, 2)
    before = processes("EngineReplica")
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(processes("EngineReplica") - before) == 1 and serving() == [1, 1], "another engine", 120)
    asker.stop()
    assert {(status, body.get("policy_version")) for status, body in asker.answers} == {(200, 1)}

    policy.unpin(str(run_dir))
    wait_until(lambda: serving() == [2, 2], "the newest version")
    assert call(f"{url}/v1/completions", ASK)[1]["policy_version"] == 2
    told = kinds_of(f"{url}/v1/policy/events", 8)
    assert told == ["rebuilt", "serving", "pinned", "serving", "retired", "unpinned", "serving", "retired"]


def kinds_of(url, count):
    """Return the kinds of the first events of a stream."""
    request = urllib.request.Request(url)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=60) as response:
        kinds = []
        while len(kinds) < count:
            line = response.readline().decode()
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: ").strip())
        return kinds
