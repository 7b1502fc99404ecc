"""Admin listener with an engine and a registry: operator actions, admin keys, and fuzzing."""

import stat
from collections import Counter

import pytest
import schemathesis
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from actors.registry.files import read_admin
from actors.registry.records import AdminState
from actors.registry.registry import Registry
from deploy.errors import UserError
from deploy.service.admin.admin_app import create_admin_app, guarded_admin
from deploy.service.admin.steering import Steering, before_the_present
from deploy.service.api.app import create_app, guarded
from deploy.service.api.policy_events import RegistryReader
from deploy.service.engine.follower import VersionFollower
from deploy.service.engine.loaded_version import NoSuchVersionError, RefusedVersionError
from deploy.service.gateway.access import MAX_BODY_BYTES
from deploy.service.gateway.api_keys import ApiKeys, read_admin_keys, read_keys
from deploy.service.gateway.rate_limits import RateLimits
from tests.deploy.service.fuzzing import NUM_CASES, SEED, each_case

ADMIN_KEY, SERVICE_KEY = "the-key-of-the-operator", "the-key-of-some-client"
BEARER = {"Authorization": f"Bearer {ADMIN_KEY}"}


class OneEngine:
    """One engine in this process. It polls the registry whenever its state is requested."""

    def __init__(self, host, follower):
        self.host, self.follower = host, follower
        self.is_stuck = False

    def states(self):
        if not self.is_stuck:
            self.follower.follow_once(0)
        return [self.host.state()]

    def prepare(self, policy, timeout_s):
        assert 0 < timeout_s <= 60
        try:
            self.host.versions.prepare(policy)
        except (NoSuchVersionError, RefusedVersionError) as error:
            return [str(error)]
        return []

    def stored(self, store):
        return frozenset({3}) if store == "d1-weights-tiny" else frozenset()


@pytest.fixture
def engine_of_run(host, registry, run_dir, make_policy):
    """An engine that has served versions 1, 2 and 3 in turn."""
    follower = VersionFollower(registry, host.versions, run_dir)
    host._follower_status = lambda: follower.status
    for version in (1, 2, 3):
        registry.announce(make_policy(version, weight_store="d1-weights-tiny", num_correct=version, num_problems=4))
        assert follower.follow_once(0)
    return OneEngine(host, follower)


@pytest.fixture
def steering(engine_of_run, registry, run_dir):
    return Steering(registry, run_dir, engine_of_run)


@pytest.fixture
def app(steering, registry):
    return create_admin_app(steering, RegistryReader(registry))


@pytest.fixture
def make_client(app, open_client):
    inside = guarded_admin(app, ApiKeys.of(f"me:{ADMIN_KEY}", "test"), RateLimits("1000000/second"))
    return lambda headers=BEARER: open_client(inside, headers)


@pytest.fixture
def client(make_client):
    return make_client()


def events_of(registry):
    return [(event.kind.value, event.version, event.why) for event in registry.events("0", 0)]


def assert_error(response, status, code, words):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert words in error["message"]
    assert error["message"].endswith(".")


# Operator actions.


def test_a_pin_holds_until_it_is_taken_away(client, registry, run_dir, host, make_policy):
    body = client.post("/admin/pin", json={"version": 2, "why": "it adds well"}).json()
    assert body == {"pinned": 2, "paused": False, "engines": [{"id": "local", "policy_version": 2}]}
    assert read_admin(run_dir) == AdminState(pinned=2, is_paused=False)
    registry.announce(make_policy(4))
    assert client.get("/admin/policy").json()["engines"] == [{"id": "local", "policy_version": 2}]
    assert ("pinned", 2, "it adds well") in events_of(registry)
    body = client.delete("/admin/pin", params={"why": "fixed"}).json()
    assert body == {"pinned": None, "paused": False, "engines": [{"id": "local", "policy_version": 4}]}
    assert read_admin(run_dir) == registry.admin() == AdminState(pinned=None, is_paused=False)
    assert ("unpinned", 2, "fixed") in events_of(registry)
    assert host.versions.policy.version == 4


def test_a_pause_keeps_what_serves(client, registry, run_dir, make_policy):
    assert client.post("/admin/pause", json={"why": "for lunch"}).json()["paused"]
    assert read_admin(run_dir).is_paused
    registry.announce(make_policy(4))
    assert client.get("/admin/policy").json()["engines"] == [{"id": "local", "policy_version": 3}]
    body = client.post("/admin/resume").json()
    assert body == {"pinned": None, "paused": False, "engines": [{"id": "local", "policy_version": 4}]}
    assert not read_admin(run_dir).is_paused
    assert [kind for kind, _, _ in events_of(registry)][-4:] == ["published", "resumed", "serving", "retired"]


def test_a_rollback_pins_what_served_before_and_goes_on_backwards(client, registry):
    body = client.post("/admin/rollback", json={"why": "it swears"}).json()
    assert (body["policy_version"], body["pinned"]) == (2, 2)
    assert body["engines"] == [{"id": "local", "policy_version": 2}]
    assert client.post("/admin/rollback").json()["policy_version"] == 1
    refused = client.post("/admin/rollback")
    assert_error(refused, 409, "not_servable", "no policy version that served before")
    assert registry.admin().pinned == 1


@pytest.mark.parametrize(
    ("served", "present", "before"),
    [
        ([1, 2, 3], 3, 2),
        ([1, 2, 3, 2], 2, 1),
        ([1, 2, 3, 2, 3], 3, 2),
        ([1, 2, 3, 2, 4], 4, 2),
        ([3], 3, None),
        ([], 3, None),
        ([1, 2], None, None),
        ([1, 2], 7, None),
    ],
)
def test_before_the_present_is_what_served_before_it_first_did(served, present, before):
    assert before_the_present(served, present) == before


def test_the_versions_are_shown_with_what_can_be_loaded(
    client, registry, run_dir, add_checkpoint, make_policy, engine_of_run
):
    engine_of_run.is_stuck = True
    registry.announce(make_policy(7, checkpoint=str(add_checkpoint(run_dir, 7))))
    registry.announce(make_policy(8, checkpoint="/gone", weight_store="elsewhere"))
    registry.refuse(8, "bad checksum")
    body = client.get("/admin/policy").json()
    assert (body["newest"], body["base"], body["pinned"], body["paused"]) == (8, 1, None, False)
    shown = {one["policy_version"]: (one["is_loadable"], one["is_refused"]) for one in body["versions"]}
    assert shown == {8: (False, True), 7: (True, False), 3: (True, False), 2: (True, False), 1: (True, False)}
    assert body["versions"][-1]["score"]["accuracy"] == 0.25
    assert body["versions"][1]["checkpoint"] == str(run_dir / "checkpoints" / "rl-7")
    assert [one["policy_version"] for one in client.get("/admin/policy?limit=1").json()["versions"]] == [8]


# Refused actions change nothing.


def test_a_version_that_nobody_knows_is_not_pinned(client, registry):
    assert_error(client.post("/admin/pin", json={"version": 9}), 404, "model_not_found", "no policy version 9")
    assert registry.admin().pinned is None


@pytest.mark.parametrize("failure", [LookupError("the store moved on"), ValueError("the checksum differs")])
def test_a_version_that_an_engine_cannot_load_is_not_pinned(client, registry, run_dir, host, make_policy, failure):
    client.post("/admin/pin", json={"version": 2})
    before = events_of(registry)

    def fail(policy):
        raise failure

    host.versions._load = fail
    registry.announce(make_policy(9))
    assert_error(client.post("/admin/pin", json={"version": 9}), 409, "not_servable", str(failure))
    assert registry.admin() == read_admin(run_dir) == AdminState(pinned=2, is_paused=False)
    assert events_of(registry) == [*before, ("published", 9, None)]


def test_a_pin_that_an_engine_does_not_take_is_put_back(client, registry, run_dir, engine_of_run, monkeypatch):
    monkeypatch.setattr("deploy.service.admin.steering._SERVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("deploy.service.admin.steering._POLL_S", 0.01)
    engine_of_run.is_stuck = True
    assert_error(client.post("/admin/pin", json={"version": 2}), 503, "unavailable", "one serves 3")
    assert registry.admin() == read_admin(run_dir) == AdminState(pinned=None, is_paused=False)


def test_what_cannot_be_written_down_is_not_done(client, registry, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deploy.service.admin.steering.write_admin", full)
    for method, path, body in (("POST", "/admin/pin", {"version": 2}), ("POST", "/admin/pause", {})):
        assert_error(client.request(method, path, json=body), 503, "unavailable", "No space left on device")
        assert registry.admin() == AdminState(pinned=None, is_paused=False)
    registry.pause(True)
    registry.pin(2)
    assert client.delete("/admin/pin").status_code == client.post("/admin/resume").status_code == 503
    assert registry.admin() == AdminState(pinned=2, is_paused=True)


def test_without_the_registry_nothing_changes(client, steering, run_dir):
    client.post("/admin/pin", json={"version": 2})
    steering.registry = Registry("redis://:none@127.0.0.1:1/0", "tiny")
    requests = [("POST", "/admin/pin"), ("POST", "/admin/rollback"), ("POST", "/admin/pause"), ("GET", "/admin/policy")]
    for method, path in [*requests, ("DELETE", "/admin/pin"), ("POST", "/admin/resume")]:
        body = {"version": 1} if path == "/admin/pin" and method == "POST" else None
        assert_error(client.request(method, path, json=body), 503, "unavailable", "registry cannot be reached")
    assert read_admin(run_dir) == AdminState(pinned=2, is_paused=False)


def test_a_change_that_half_fails_is_taken_back(client, steering, run_dir, monkeypatch):
    client.post("/admin/pin", json={"version": 2})
    client.post("/admin/pause")

    def away(*_):
        raise ConnectionError("it died just now")

    monkeypatch.setattr(steering.registry, "pin", away)
    monkeypatch.setattr(steering.registry, "pause", away)
    assert client.delete("/admin/pin").status_code == client.post("/admin/resume").status_code == 503
    assert read_admin(run_dir) == AdminState(pinned=2, is_paused=True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "version"),
        ({"version": "2"}, "version"),
        ({"version": True}, "version"),
        ({"version": -1}, "version"),
        ({"version": 2**40}, "version"),
        ({"version": 2, "force": True}, "force"),
        ({"version": 2, "why": "x" * 501}, "why"),
        ([], "body"),
    ],
)
def test_bodies_that_are_no_pin_are_refused(client, registry, body, words):
    response = client.post("/admin/pin", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert registry.admin().pinned is None


def test_a_reason_that_is_too_long_is_refused(client, registry):
    registry.pin(2)
    why = "x" * 501
    assert client.delete("/admin/pin", params={"why": why}).status_code == 400
    for path in ("/admin/rollback", "/admin/pause", "/admin/resume"):
        assert client.post(path, json={"why": why}).status_code == 400
    assert registry.admin() == AdminState(pinned=2, is_paused=False)


# Admin keys.


def test_every_admin_route_wants_an_admin_key(app, make_client):
    walked = {route.path for route in app.routes}
    assert {
        "/admin/policy",
        "/admin/pin",
        "/admin/rollback",
        "/admin/pause",
        "/admin/resume",
        "/admin/events",
    } <= walked
    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
    for headers in ({}, {"Authorization": f"Bearer {SERVICE_KEY}"}):
        client = make_client(headers)
        for path in [*walked, "/", "/health", "/health/ready", "/assets/main.js"]:
            assert {client.request(method, path).status_code for method in methods} == {401}, path
    big = b"x" * (MAX_BODY_BYTES + 1)
    assert make_client().post("/admin/pin", content=big).status_code == 413


def test_an_admin_key_does_not_open_the_service(service):
    keys = ApiKeys.of(SERVICE_KEY, "test")
    with TestClient(guarded(create_app(service), keys, RateLimits("1000000/second"))) as client:
        assert client.get("/version", headers={"Authorization": f"Bearer {SERVICE_KEY}"}).status_code == 200
        assert client.get("/version", headers=BEARER).status_code == 401
        assert client.get("/admin/policy", headers={"Authorization": f"Bearer {SERVICE_KEY}"}).status_code == 404


@pytest.fixture
def bare(monkeypatch):
    """An environment without API keys."""
    for name in ("D1_API_TOKEN", "D1_API_KEYS_FILE", "D1_ADMIN_TOKEN", "D1_ADMIN_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_admin_key_is_made_once_and_is_its_owners_alone(run_dir, bare):
    keys = read_admin_keys(run_dir, read_keys(run_dir))
    token = (run_dir / "admin.token").read_text().strip()
    assert keys.owner([b"Bearer " + token.encode()]) == "key1"
    assert read_keys(run_dir).owner([b"Bearer " + token.encode()]) is None
    assert stat.S_IMODE((run_dir / "admin.token").stat().st_mode) == 0o600


def test_a_key_for_both_listeners_is_refused(run_dir, bare, monkeypatch, tmp_path):
    monkeypatch.setenv("D1_API_TOKEN", ADMIN_KEY)
    path = tmp_path / "keys"
    path.write_text(f"ann:{'a' * 20}\nbob:{ADMIN_KEY}\n")
    monkeypatch.setenv("D1_ADMIN_KEYS_FILE", str(path))
    with pytest.raises(UserError, match="opens both the service and its admin listener"):
        read_admin_keys(run_dir, read_keys(run_dir))


# Fuzzing.


@pytest.mark.timeout(120 + NUM_CASES // 2)
def test_whatever_is_sent_is_answered(app):
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    # The stream of events never ends; test_policy_events.py tests it.
    operations = [one for found in schema.get_all_operations() if (one := found.ok()).path != "/admin/events"]
    statuses = Counter()

    def ask(case):
        response = case.call()
        statuses[case.operation.path, response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            each_case(operation, mode, NUM_CASES // 50, SEED, ask)
    answered = {path for path, status in statuses if status == 200}
    assert {"/admin/policy", "/admin/pause", "/admin/resume", "/admin/rollback"} <= answered, statuses
    assert sum(count for (_, status), count in statuses.items() if status == 400) >= NUM_CASES / 30, statuses
