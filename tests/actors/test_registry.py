"""The registry on the embedded server, without Ray."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import redis

from actors.registry import MalformedEntryError, PolicyVersion, Registry
from actors.registry_server import ValkeyServer

POLICY = PolicyVersion(
    version=3,
    round=2,
    phase="rl",
    num_correct=None,
    num_problems=None,
    checkpoint=None,
    weight_store="d1-weights-tiny",
    manifest_digest="abc",
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server():
    server = ValkeyServer(free_port(), secrets.token_urlsafe(16))
    yield server
    server.stop()


@pytest.fixture
def registry(server):
    registry = Registry(server.url, secrets.token_hex(4))
    yield registry
    registry.close()


def test_the_latest_is_what_was_announced_last(registry):
    assert registry.latest() is None
    registry.announce(POLICY)
    registry.announce(replace(POLICY, version=4, round=3))
    assert registry.latest() == replace(POLICY, version=4, round=3)


def test_a_follower_reads_on_where_it_stopped(registry):
    registry.announce(POLICY)
    registry.announce(replace(POLICY, version=4))
    seen = registry.follow("0", 0)
    assert [policy.version for _, policy in seen] == [3, 4]
    assert registry.follow(seen[-1][0], 0) == []
    registry.announce(replace(POLICY, version=5))
    assert [policy.version for _, policy in registry.follow(seen[-1][0], 0)] == [5]


def test_a_follower_waits_for_an_announcement(registry):
    began = time.monotonic()
    timer = threading.Timer(0.2, lambda: registry.announce(POLICY))
    timer.start()
    assert [policy for _, policy in registry.follow("0", 2000)] == [POLICY]
    timer.join(10)
    assert 0.1 < time.monotonic() - began < 1.5


def test_waiting_ends_without_an_announcement(registry):
    assert registry.follow("0", 100) == []


def test_runs_do_not_see_each_other(server, registry):
    registry.announce(POLICY)
    other = Registry(server.url, "another")
    assert other.latest() is None
    other.close()


def test_a_score_is_the_latest_version_announced_again(registry):
    registry.announce(POLICY)
    assert registry.score(3, 7, 10)
    assert registry.latest() == replace(POLICY, num_correct=7, num_problems=10)
    assert registry.latest().has_same_weights(POLICY)


def test_a_score_that_comes_late_does_not_bring_old_weights_back(registry):
    registry.announce(POLICY)
    registry.announce(replace(POLICY, version=4))
    assert not registry.score(3, 7, 10)
    assert registry.latest().version == 4


def test_versions_of_another_manifest_are_other_weights():
    assert not POLICY.has_same_weights(replace(POLICY, manifest_digest="def"))
    assert POLICY.has_same_weights(replace(POLICY, manifest_digest=None))
    assert not POLICY.has_same_weights(replace(POLICY, version=4))


def test_a_registry_is_usable_again_after_its_server_was_away():
    port, password = free_port(), secrets.token_urlsafe(16)
    server = ValkeyServer(port, password)
    registry = Registry(server.url, "run")
    registry.announce(POLICY)
    last_id = registry.follow("0", 0)[-1][0]
    server.stop()
    with pytest.raises(ConnectionError, match=f"registry at 127.0.0.1:{port} cannot be used"):
        registry.latest()
    server = ValkeyServer(port, password)
    try:
        registry.announce(replace(POLICY, version=4))
        # The new server knows nothing of the old one's entries, yet the follower misses nothing that is new.
        assert [policy.version for _, policy in registry.follow(last_id, 0)] == [4]
    finally:
        registry.close()
        server.stop()


def test_a_wrong_password_is_refused_in_a_sentence(server):
    url = server.url.replace("redis://:", "redis://:wrong-")
    with pytest.raises(ConnectionError, match="refused the password") as caught:
        Registry(url, "run").ping()
    assert "wrong-" not in str(caught.value)
    with pytest.raises(ConnectionError, match="refused the password"):
        Registry(url.replace(url.split("@")[0], "redis://").replace("//@", "//"), "run").announce(POLICY)


def test_entries_that_are_no_policy_version_can_be_skipped(server, registry):
    client = redis.Redis.from_url(server.url)
    registry.announce(POLICY)
    client.xadd(registry._stream, {"policy_version": b"\xff{"})
    client.xadd(registry._stream, {"other": "x"})
    registry.announce(replace(POLICY, version=4))
    client.close()
    last_id, versions, num_malformed = "0", [], 0
    for _ in range(4):
        try:
            for entry_id, policy in registry.follow(last_id, 0):
                last_id = entry_id
                versions.append(policy.version)
        except MalformedEntryError as error:
            last_id, num_malformed = error.entry_id, num_malformed + 1
    assert (versions, num_malformed) == ([3, 4], 2)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        POLICY.to_json().replace('"version": 3', '"version": "3"'),
        POLICY.to_json().replace('"version": 3', '"version": true'),
        POLICY.to_json().replace('"round": 2', '"round": -1'),
        POLICY.to_json().replace('"phase": "rl"', '"phase": null'),
        POLICY.to_json().replace("{", '{"extra": 1, ', 1),
    ],
)
def test_json_that_is_no_policy_version_is_refused(text):
    with pytest.raises(ValueError, match="policy version"):
        PolicyVersion.from_json(text)


def test_json_gives_a_policy_version_back():
    assert PolicyVersion.from_json(POLICY.to_json()) == POLICY


def test_the_server_ends_when_its_process_is_killed():
    port = free_port()
    script = (
        "import time; from actors.registry_server import ValkeyServer;"
        f"s = ValkeyServer({port}, 'p' * 20); print(s._process.pid, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with child:
        server_pid = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_alive(server_pid):
        assert time.monotonic() < deadline, "the server outlived its process"
        time.sleep(0.05)


def test_a_server_that_cannot_start_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match="ended with status"):
            ValkeyServer(taken.getsockname()[1], "p" * 20)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Nobody may be there to reap it.
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
