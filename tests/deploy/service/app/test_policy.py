"""Routes of the policy and its versions."""

import time
from dataclasses import replace

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from actors.run_log import append_event
from deploy.recipe.recipe import ServiceSection
from deploy.service.api.app import create_app, guarded
from deploy.service.api.inference import ServicePlanner
from deploy.service.errors import ServiceError
from deploy.service.gateway.keys import ApiKeys, RateLimits
from tests.deploy.service.app.asking import ASK, BEARER, TOKEN, assert_error


def test_models_are_aliases_versions_and_the_runs_name(client, versions, make_policy, service, make_sampler):
    versions.adopt(make_policy(3))
    time.sleep(0.3)
    models = {model["id"]: model["policy_version"] for model in client.get("/v1/models").json()["data"]}
    assert models == {"policy": 3, "base": 1, "last": 3, "tiny": 3, "policy@v000003": 3, "policy@v000001": 1}
    assert client.get("/v1/models/base").json()["policy_version"] == 1
    assert_error(client.get("/v1/models/other"), 404, "model_not_found")
    for model, version in models.items():
        response = client.post("/v1/completions", json=ASK | {"model": model})
        assert response.json()["policy_version"] == version
        assert response.json()["model"] == model
        assert response.headers["x-policy-version"] == str(version)
    texts = {
        version: client.post("/v1/completions", json=ASK | {"model": f"policy@v00000{version}"}).json()["choices"]
        for version in (1, 3)
    }
    assert texts[1] != texts[3]


def test_models_include_served_names_with_start_time_and_context_length(service, open_client, codec):
    named = ServicePlanner(codec, service.planner._defaults, "tiny", served_names=("gpt-4o", "org/tiny"))
    client = open_client(
        guarded(create_app(replace(service, planner=named)), ApiKeys.of(TOKEN, "test"), RateLimits("1000/second")),
        BEARER,
    )
    models = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    for name in ("policy", "last", "tiny", "gpt-4o", "org/tiny"):
        assert models[name]["policy_version"] == models["policy"]["policy_version"]
        assert 1_700_000_000 < models[name]["created"] <= time.time()
        assert models[name]["max_model_len"] == codec.config.max_sequence_length
        assert client.get(f"/v1/models/{name}").json() == models[name]
        asked = client.post("/v1/completions", json={"prompt": [3, 4], "model": name})
        assert (asked.status_code, asked.json()["model"]) == (200, name)
    refused = assert_error(
        client.post("/v1/completions", json={"prompt": [3], "model": "gpt-4"}), 404, "model_not_found"
    )
    assert refused["message"].endswith("policy, base, best, policy@vNNNNNN, tiny, gpt-4o and org/tiny.")


@pytest.mark.parametrize("name", ["base", "best"])
def test_a_run_named_like_a_version_does_not_hide_the_version(service, codec, name):
    planner = ServicePlanner(codec, service.planner._defaults, name)
    assert planner.wanted(name) == name
    assert planner.aliases == ("last",)
    with pytest.raises(ServiceError, match=r"the models policy, base, best, policy@vNNNNNN and last\.$"):
        planner.wanted("other")


def test_ping_needs_no_key(make_client):
    assert make_client(headers={}).get("/ping").json()["status"] == "ready"


@pytest.mark.parametrize("name", ["policy", "base", "best", "last", "policy@v000001", "", "a b", "-a"])
def test_a_served_name_that_is_already_a_model_is_refused(name):
    with pytest.raises(ValidationError):
        ServiceSection(served_names=(name,))
    assert ServiceSection(served_names=("gpt-4o", "org/model:8b")).served_names[1] == "org/model:8b"


def test_best_is_a_model_if_the_run_has_validation_problems(client, run_dir, add_checkpoint, monkeypatch):
    monkeypatch.setattr("deploy.service.checkpoints._TTL_S", 0.0)
    add_checkpoint(run_dir, 2)
    add_checkpoint(run_dir, 3)
    assert_error(client.post("/v1/completions", json=ASK | {"model": "best"}), 404, "model_not_found")
    for version, right in ((2, 5), (3, 4)):
        scored = {"policy_version": version, "round": version, "num_correct": right, "num_problems": 10}
        append_event(run_dir, "evaluation", label="validation", **scored)
    time.sleep(0.3)
    assert client.get("/v1/models/best").json()["policy_version"] == 2
    assert client.get("/v1/policy").json()["aliases"] == {"policy": 1, "base": 1, "best": 2}
    assert client.post("/v1/completions", json=ASK | {"model": "best"}).json()["policy_version"] == 2


def test_versions_that_have_checkpoints_are_models(client, run_dir, add_checkpoint):
    add_checkpoint(run_dir, 2)
    add_checkpoint(run_dir, 3, phase="control")
    models = {model["id"]: model["policy_version"] for model in client.get("/v1/models").json()["data"]}
    assert models == {"policy": 1, "base": 1, "last": 1, "tiny": 1, "policy@v000002": 2, "policy@v000001": 1}
    shown = client.get("/v1/models/policy@v000002").json()
    assert (shown["id"], shown["policy_version"]) == ("policy@v000002", 2)
    known = client.get("/v1/policy/2").json()
    assert (known["phase"], known["is_live"], known["is_serving"]) == ("rl", False, False)
    answer = client.post("/v1/completions", json=ASK | {"model": "policy@v000002"})
    assert answer.json()["policy_version"] == 2
    error = assert_error(client.get("/v1/models/policy@v000003"), 404, "model_not_found")
    assert error["param"] == "model"
    assert_error(client.post("/v1/completions", json=ASK | {"model": "policy@v000003"}), 404, "model_not_found")


def test_policy_shows_the_score_and_the_refused_versions(client, versions, make_policy):
    versions.adopt(make_policy(2, num_correct=3, num_problems=4, round=1, manifest_digest="abc"))

    def damaged(policy):
        raise ValueError("the checksum differs")

    versions._load = damaged
    versions.learn(make_policy(5))
    with pytest.raises(ValueError, match="checksum"):
        versions.adopt(make_policy(5))
    time.sleep(0.3)
    body = client.get("/v1/policy").json()
    score = body.pop("score")
    assert score["interval_95"][0] < 0.75 < score["interval_95"][1]
    assert (score["policy_version"], score["num_correct"], score["num_problems"]) == (2, 3, 4)
    assert body == {
        "run": "tiny",
        "policy_version": 2,
        "round": 1,
        "phase": "rl",
        "checksum": "abc",
        "lag": {"published": 5, "behind": 3},
        "aliases": {"policy": 2, "base": 1},
        "pinned": 1,
        "paused": True,
        "live": [1, 2],
        "num_swaps": 1,
        "refused": [{"version": 5, "why": "Policy version 5 is not served: the checksum differs"}],
        "last_error": "it was away",
    }
    assert client.get("/v1/policy/2").json()["is_serving"]
    assert not client.get("/v1/policy/1").json()["is_serving"]
    assert_error(client.get("/v1/policy/77"), 404)
    assert_error(client.get("/v1/policy/-1"), 400)
    assert_error(client.get("/v1/policy/..%2f"), 404)


def test_a_single_checkpoint_lists_the_versions_of_its_engine(service):
    inside = guarded(create_app(replace(service, checkpoints=None)), ApiKeys.of(TOKEN, "test"), RateLimits("9/second"))
    with TestClient(inside, headers=BEARER) as client:
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert "policy@v000001" in names
        assert_error(client.get("/v1/policy/2"), 404, "model_not_found")
