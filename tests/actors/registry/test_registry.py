"""The registry without Ray: the same rules on the embedded Valkey server and on Debian's redis-server."""

import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import redis

from actors.registry.records import DEFAULT_ADMIN_STATE, AdminState, EventKind, MalformedEntryError, PolicyVersion
from actors.registry.registry import Registry
from actors.registry.server import ValkeyServer, free_port
from actors.registry.state import RegistryState, version_field
from tests.announced import latest
from tests.processes import is_running
from tests.redis_server import DebianRedis

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


@pytest.fixture(scope="module", params=["embedded valkey", "debian redis"])
def server(request):
    if request.param == "debian redis":
        server = DebianRedis(free_port(), secrets.token_urlsafe(16))
    else:
        server = ValkeyServer(free_port(), secrets.token_urlsafe(16))
    yield server
    server.stop()


@pytest.fixture
def registry(server):
    registry = Registry(server.url, secrets.token_hex(4))
    yield registry
    registry.close()


@pytest.fixture
def client(server):
    client = redis.Redis.from_url(server.url)
    yield client
    client.close()


def test_the_latest_version_is_the_last_announced(registry):
    assert latest(registry) is None
    registry.announce(POLICY)
    registry.announce(replace(POLICY, version=4, round=3))
    assert latest(registry) == replace(POLICY, version=4, round=3)


def test_wait_returns_the_next_event_id(registry):
    began = time.monotonic()
    timer = threading.Timer(0.2, lambda: registry.announce(POLICY))
    timer.start()
    seen = registry.wait("0", 20_000)
    timer.join(10)
    assert 0.1 < time.monotonic() - began < 10
    assert registry.events("0")[-1].id == seen
    assert registry.wait(seen, 0) == registry.wait(seen, 50) == seen
    registry.announce(replace(POLICY, version=4))
    assert registry.wait(seen, 0) == registry.events(seen)[0].id != seen


def test_runs_are_isolated(server, registry):
    registry.announce(POLICY)
    other = Registry(server.url, "another")
    assert latest(other) is None
    other.close()


def test_a_score_updates_the_latest_version(registry):
    registry.announce(POLICY)
    assert registry.score(3, 7, 10)
    assert latest(registry) == replace(POLICY, num_correct=7, num_problems=10)
    assert latest(registry).has_same_weights(POLICY)


def test_a_late_score_does_not_change_the_latest_version(registry):
    registry.announce(POLICY)
    registry.announce(replace(POLICY, version=4))
    assert registry.score(3, 7, 10)
    assert latest(registry).version == 4


def test_a_checkpoint_can_be_added_to_a_known_version(registry):
    registry.announce(POLICY)
    registry.score(3, 7, 10)
    assert registry.add_checkpoint(3, "/runs/ünï/rl-000002")
    assert latest(registry) == replace(POLICY, num_correct=7, num_problems=10, checkpoint="/runs/ünï/rl-000002")
    registry.announce(replace(POLICY, version=4))
    assert registry.add_checkpoint(3, "/elsewhere")
    assert latest(registry).version == 4
    assert registry.version(3).checkpoint == "/elsewhere"
    assert not registry.add_checkpoint(5, "/elsewhere")


def test_a_version_is_found_by_number_with_its_score(registry):
    registry.announce(POLICY)
    registry.announce(replace(POLICY, version=4))
    assert registry.score(3, 7, 10)
    assert registry.version(3) == replace(POLICY, num_correct=7, num_problems=10)
    assert registry.version(5) is None
    assert not registry.score(5, 7, 10)


def test_the_base_is_the_last_version_before_rl(registry):
    registry.announce(replace(POLICY, version=0, phase="untrained"))
    registry.announce(replace(POLICY, version=1, phase="sft"))
    registry.announce(replace(POLICY, version=2, phase="rl"))
    assert registry.snapshot().aliases == {"newest": 2, "base": 1}


def test_serve_is_a_compare_and_set(registry):
    for version in (3, 4):
        registry.announce(replace(POLICY, version=version, round=version - 1))
    assert registry.serve(3, expected=None)
    assert not registry.serve(4, expected=None)
    assert not registry.serve(4, expected=2)
    assert registry.snapshot().aliases["policy"] == 3
    assert registry.serve(4, expected=3)
    assert registry.snapshot().aliases["policy"] == 4


def test_of_concurrent_serve_calls_one_succeeds(server, registry):
    for version in range(9):
        registry.announce(replace(POLICY, version=version))
    registry.serve(0, expected=None)
    movers = [Registry(server.url, registry._state.split(":")[1]) for _ in range(8)]
    barrier = threading.Barrier(8, timeout=20)

    def move(number):
        barrier.wait()
        return movers[number - 1].serve(number, expected=0)

    with ThreadPoolExecutor(8) as pool:
        moved = list(pool.map(move, range(1, 9)))
    for mover in movers:
        mover.close()
    assert sorted(moved) == [False] * 7 + [True]
    assert registry.snapshot().aliases["policy"] == moved.index(True) + 1
    assert [event.kind for event in registry.events("0")][-2:] == [EventKind.SERVING, EventKind.RETIRED]


def test_an_unknown_version_cannot_be_served_or_pinned(registry):
    registry.announce(POLICY)
    with pytest.raises(LookupError, match="policy version 9 is not known"):
        registry.serve(9, expected=None)
    with pytest.raises(LookupError, match="policy version 9 is not known"):
        registry.set_admin(AdminState(pinned=9, is_paused=False, changed_at=1.0))
    assert registry.snapshot().admin == DEFAULT_ADMIN_STATE
    assert registry.snapshot().aliases == {"newest": 3}


def test_choosing_the_best_version_emits_an_event(registry):
    for version in (1, 2):
        registry.announce(replace(POLICY, version=version))
    assert registry.choose_best(2)
    assert not registry.choose_best(7)
    assert registry.snapshot().aliases["best"] == 2
    assert registry.choose_best(1)
    assert registry.snapshot().aliases["best"] == 1
    assert [event.version for event in registry.last_events(9) if event.kind is EventKind.MOVED] == [2, 1]


def test_version_events_are_in_order(registry):
    registry.announce(POLICY)
    registry.serve(3, expected=None)
    registry.announce(replace(POLICY, version=4, round=3))
    registry.score(4, 1, 2)
    registry.announce(replace(POLICY, version=4, round=3))
    registry.serve(4, expected=3)
    assert registry.refuse(4, "worse by 9 points")
    told = [(event.kind, event.version, event.round, event.why) for event in registry.events("0")]
    assert told == [
        ("published", 3, 2, None),
        ("serving", 3, 2, None),
        ("published", 4, 3, None),
        ("serving", 4, 3, None),
        ("retired", 3, 2, None),
        ("refused", 4, 3, "worse by 9 points"),
    ]


def test_the_same_weights_are_refused_once(registry):
    registry.announce(POLICY)
    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(lambda n: registry.refuse(3, f"engine {n}: bad checksum"), range(8)))
    assert sum(told) == 1
    assert registry.snapshot().refused == {3}
    registry.announce(POLICY)
    assert registry.snapshot().refused == {3}
    registry.announce(replace(POLICY, manifest_digest="def"))
    assert registry.snapshot().refused == frozenset()
    assert registry.refuse(3, "again")
    kinds = [event.kind for event in registry.events("0")]
    assert kinds == [EventKind.PUBLISHED, EventKind.REFUSED, EventKind.PUBLISHED, EventKind.REFUSED]


def test_a_refusal_of_another_digest_has_no_effect(registry):
    registry.announce(replace(POLICY, manifest_digest="def"))
    assert not registry.refuse(3, "the store has other weights by now", "abc")
    assert registry.snapshot().refused == frozenset()
    assert registry.refuse(3, "bad checksum", "def")


def test_a_new_checkpoint_lifts_a_refusal(registry):
    registry.announce(POLICY)
    registry.refuse(3, "it arrived damaged")
    registry.score(3, 5, 9)
    assert registry.snapshot().refused == {3}
    registry.add_checkpoint(3, "/run/checkpoints/rl-000002")
    assert registry.snapshot().refused == frozenset()
    registry.refuse(3, "it is damaged there too")
    registry.add_checkpoint(3, "/run/checkpoints/rl-000002")
    assert registry.snapshot().refused == {3}


def test_other_weights_of_a_version_emit_another_event(registry):
    registry.announce(POLICY)
    registry.announce(replace(POLICY, manifest_digest="def"))
    assert [event.kind for event in registry.events("0")] == [EventKind.PUBLISHED] * 2


def test_a_reannounced_version_keeps_score_and_checkpoint(registry):
    registry.announce(POLICY)
    registry.add_checkpoint(3, "/run/checkpoints/rl-000002")
    registry.score(3, 5, 9)
    known = registry.version(3)
    registry.announce(replace(POLICY, weight_store="d1-weights-other", manifest_digest=None))
    assert registry.version(3) == latest(registry) == replace(known, weight_store="d1-weights-other")
    # Other weights have no checkpoint and no score.
    other = replace(POLICY, manifest_digest="def")
    registry.announce(other)
    assert registry.version(3) == latest(registry) == other


def test_events_have_times_and_are_read_incrementally(registry):
    registry.announce(POLICY)
    (first,) = registry.events("0")
    assert abs(first.time_s - time.time()) < 60
    assert registry.events(first.id) == []
    registry.set_admin(AdminState(pinned=None, is_paused=True, changed_at=1.0))
    (second,) = registry.events(first.id)
    assert (second.kind, second.version, second.round) == (EventKind.PAUSED, None, None)
    assert registry.last_events(5) == [first, second]
    assert registry.last_events(1) == [second]


@pytest.mark.parametrize("last_id", ["", "$", "+", "1-2-3", "1; FLUSHALL", "9" * 40])
def test_an_invalid_event_id_is_refused(registry, last_id):
    with pytest.raises(ValueError, match="no id of an entry"):
        registry.events(last_id)


def test_the_event_stream_is_bounded(client, registry):
    with client.pipeline(transaction=False) as pipe:
        # One call trims at most 10,000 entries.
        for _ in range(10_500):
            pipe.xadd(registry._events, {"json": "{}"})
        pipe.execute()
    registry.announce(POLICY)
    # Trimming removes whole stream nodes, so that up to a hundred extra entries may remain.
    assert 9_000 <= client.xlen(registry._events) <= 10_100


def test_a_run_has_one_hash_and_one_stream(client, registry):
    run = registry._state.split(":")[1]
    registry.announce(POLICY, 1.0)
    registry.serve(3, expected=None)
    registry.refuse(3, "bad checksum")
    registry.set_admin(AdminState(pinned=3, is_paused=True, changed_at=1.0))
    keys = {key.decode(): client.type(key).decode() for key in client.scan_iter(f"d1:{run}:*")}
    assert keys == {f"d1:{run}:state": "hash", f"d1:{run}:events": "stream"}


def test_admin_settings_are_stored_and_emit_one_event(registry):
    def want(pinned, is_paused, changed_at):
        state = AdminState(pinned=pinned, is_paused=is_paused, why="steady", changed_at=changed_at)
        registry.set_admin(state)
        return state

    registry.announce(POLICY)
    assert registry.snapshot().admin == DEFAULT_ADMIN_STATE
    pinned = want(3, False, 1.0)
    assert registry.snapshot().admin == pinned == want(3, False, 2.0)
    paused = want(3, True, 3.0)
    registry.announce(replace(POLICY, version=4))
    # An engine may read an outdated copy of the file.
    want(None, False, 2.0)
    assert registry.snapshot().admin == paused
    want(None, False, 4.0)
    assert registry.snapshot().admin == DEFAULT_ADMIN_STATE
    told = [(str(event.kind), event.version, event.why) for event in registry.events("0")]
    assert told == [
        ("published", 3, None),
        ("pinned", 3, "steady"),
        ("paused", None, "steady"),
        ("published", 4, None),
        ("unpinned", 3, "steady"),
        ("resumed", None, "steady"),
    ]


def test_a_new_run_inherits_nothing_from_an_earlier_run_of_its_name(registry):
    assert not registry.announce(replace(POLICY, version=9), 1700000000.25)
    registry.serve(9, expected=None)
    registry.refuse(9, "damaged")
    held = AdminState(pinned=9, is_paused=True, changed_at=1.0)
    registry.set_admin(held)
    last_event = registry.last_events(1)[0].id
    # A resumed run keeps its state, and so does a run without a known start time.
    for began_at in (1700000000.25, None):
        assert registry.announce(replace(POLICY, version=9), began_at)
        assert registry.snapshot().admin == held
    first = replace(POLICY, version=0, round=0, phase="untrained")
    assert not registry.announce(first, 1700000000.5)
    state = registry.snapshot()
    assert (state.aliases, state.newest, state.refused) == ({"newest": 0, "base": 0}, first, frozenset())
    assert (state.admin, registry.version(9)) == (DEFAULT_ADMIN_STATE, None)
    # Readers of the earlier run's events continue to read.
    assert [(event.kind, event.version) for event in registry.events(last_event)] == [(EventKind.PUBLISHED, 0)]
    # A late write of the earlier run removes nothing.
    registry.restore([POLICY], None, 1700000000.25)
    assert latest(registry) == first


def test_an_unreadable_version_is_unknown_until_announced(client, registry):
    registry.announce(POLICY)
    client.hset(registry._state, "version:3", '{"version": 3}')
    assert registry.version(3) is latest(registry) is None
    assert registry.announce(POLICY)
    assert latest(registry) == POLICY


def test_versions_with_other_digests_are_other_weights():
    assert not POLICY.has_same_weights(replace(POLICY, manifest_digest="def"))
    assert POLICY.has_same_weights(replace(POLICY, manifest_digest=None))
    assert not POLICY.has_same_weights(replace(POLICY, version=4))


def test_a_registry_reconnects_after_an_outage():
    port, password = free_port(), secrets.token_urlsafe(16)
    server = ValkeyServer(port, password)
    registry = Registry(server.url, "run")
    registry.announce(POLICY)
    last_id = registry.events("0")[-1].id
    server.stop()
    with pytest.raises(ConnectionError, match=f"registry at 127.0.0.1:{port} cannot be used"):
        latest(registry)
    server = ValkeyServer(port, password)
    try:
        registry.announce(replace(POLICY, version=4))
        # The new server lacks the old entries, but a reader misses nothing new.
        assert [event.version for event in registry.events(last_id)] == [4]
    finally:
        registry.close()
        server.stop()


def test_a_wrong_password_is_a_clear_error(server):
    url = server.url.replace("redis://:", "redis://:wrong-")
    with pytest.raises(ConnectionError, match="refused the password") as caught:
        Registry(url, "run").ping()
    assert "wrong-" not in str(caught.value)
    with pytest.raises(ConnectionError, match="refused the password"):
        Registry(url.replace(url.split("@")[0], "redis://").replace("//@", "//"), "run").announce(POLICY)


def test_malformed_stream_entries_can_be_skipped(client, registry):
    registry.announce(POLICY)
    client.xadd(registry._events, {"json": b"\xff{"})
    client.xadd(registry._events, {"other": "x"})
    registry.announce(replace(POLICY, version=4))
    last_id, versions, num_malformed = "0", [], 0
    for _ in range(4):
        try:
            for event in registry.events(last_id):
                last_id = event.id
                versions.append(event.version)
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
def test_invalid_json_is_refused(text):
    with pytest.raises(ValueError, match="policy version"):
        PolicyVersion.from_json(text)


def test_a_policy_version_round_trips_through_json():
    assert PolicyVersion.from_json(POLICY.to_json()) == POLICY


def test_the_server_dies_with_its_parent():
    port = free_port()
    script = (
        "import time; from actors.registry.server import ValkeyServer;"
        f"s = ValkeyServer({port}, 'p' * 20); print(s._process.pid, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with child:
        server_pid = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_running(server_pid):
        assert time.monotonic() < deadline, "the server outlived its process"
        time.sleep(0.05)


def test_a_failed_server_start_raises():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match="ended with status"):
            ValkeyServer(taken.getsockname()[1], "p" * 20)


def test_a_transaction_reads_only_the_versions_that_it_needs():
    stored = {version_field(number): replace(POLICY, version=number).to_json() for number in range(1000)}
    stored["newest"] = "999"
    asked = []

    def read(names):
        asked.append(list(names))
        return [stored.get(name) for name in names]

    state = RegistryState(read)
    state.load([3, 4])
    assert state.newest == replace(POLICY, version=999)
    assert state.version(4) == replace(POLICY, version=4)
    assert state.version(1000) is None
    put = replace(POLICY, version=1001, num_problems=4)
    state.put(put)
    state.put(replace(POLICY, version=3))
    assert state.version(1001) == put, "what is written is not read again"
    assert asked[1:] == [["version:3", "version:4"], ["version:999"], ["version:1000"]]
    assert state.changed == {"version:1001": put.to_json()}
