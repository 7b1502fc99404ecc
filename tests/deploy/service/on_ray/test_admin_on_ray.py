"""The admin listener on Ray: what an operator holds is held on every engine, and by those that come later."""

import os
import signal
import urllib.request

import pytest

from actors.registry.server import registry_url
from benchmarks.service.deployment import processes
from deploy.service.on_ray.launch import deploy_source
from deploy.service.source import Source
from tests.deploy.service.asking import ASK, TOKEN, Asker, call, wait_until

ADMIN_TOKEN = "the-key-of-the-operator"


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_a_pinned_version_stays_when_an_engine_dies(serve_cluster, run_dir, add_checkpoint, unused_port, monkeypatch):
    add_checkpoint(run_dir, 2, round_index=1)
    monkeypatch.setenv("D1_ADMIN_TOKEN", ADMIN_TOKEN)
    source = Source(directory=str(run_dir), is_run=True, registry_url=registry_url())
    port, admin_port = unused_port(), unused_port()
    url = deploy_source(source, "127.0.0.1", port, 2, num_gpus=0, admin_port=admin_port)
    admin = f"http://127.0.0.1:{admin_port}/admin"

    def serving():
        return [one["policy_version"] for one in call(f"{admin}/policy", token=ADMIN_TOKEN)[1]["engines"]]

    wait_until(lambda: is_up(f"{admin}/policy") and serving() == [2, 2], "both engines and the admin listener")
    assert call(f"{admin}/policy", token=TOKEN)[0] == 401
    assert call(f"{url}/v1/policy", token=ADMIN_TOKEN)[0] == 401

    # Held, also by an engine that comes later.
    status, body = call(f"{admin}/pin", {"version": 1, "why": "it adds well"}, token=ADMIN_TOKEN)
    assert (status, [one["policy_version"] for one in body["engines"]]) == (200, [1, 1])
    # The ingress has heard of it a moment later.
    wait_until(lambda: call(f"{url}/v1/policy")[1]["pinned"] == 1 and serving() == [1, 1], "the pin to be shown")
    policy = call(f"{url}/v1/policy")[1]
    assert (policy["policy_version"], policy["lag"]) == (1, {"published": 2, "behind": 1})
    asker = Asker(url, 2)
    before = processes("EngineReplica")
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(processes("EngineReplica") - before) == 1 and serving() == [1, 1], "another engine", 120)
    asker.stop()
    assert {(status, body.get("policy_version")) for status, body in asker.answers} == {(200, 1)}

    # The listener comes back at its port.
    (listener,) = processes("AdminListener")
    os.kill(listener, signal.SIGKILL)
    wait_until(lambda: is_up(f"{admin}/policy"), "the admin listener's return", 120)
    assert processes("AdminListener") != {listener}
    request = urllib.request.Request(f"{admin}/pin", method="DELETE")
    request.add_header("Authorization", f"Bearer {ADMIN_TOKEN}")
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
    wait_until(lambda: serving() == [2, 2], "the newest version")
    assert call(f"{url}/v1/completions", ASK)[1]["policy_version"] == 2
    told = kinds_of(f"{url}/v1/policy/events", 8)
    assert told == ["rebuilt", "serving", "pinned", "serving", "retired", "unpinned", "serving", "retired"]


def is_up(url):
    try:
        return call(url, token=ADMIN_TOKEN)[0] == 200
    except OSError:
        return False


def kinds_of(url, count):
    """The first events of a stream."""
    request = urllib.request.Request(url)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=60) as response:
        kinds = []
        while len(kinds) < count:
            line = response.readline().decode()
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: ").strip())
        return kinds
