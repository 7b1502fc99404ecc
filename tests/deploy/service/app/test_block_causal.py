"""Block-causal checkpoints over HTTP: the sampler's tokens, whole, streamed and live."""

import dataclasses
import json
import shutil

import pytest

from deploy.requests.body import CompletionRequest
from rollout.request import canvas_of
from tests.deploy.service.app.asking import assert_error, events_of
from tests.learner.model.on_disk.adapted import adapted
from tests.published.tiny_published import FAMILIES, publish

ASK = {"prompt": [7, 8, 9, 10, 11], "seed": 1, "temperature": 1.0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def asked(service, body):
    """Return the service's request to its sampler, the sampler's result, and the policy's config."""
    (request,) = service.planner.plan(CompletionRequest(**body)).masked_requests
    sampler = service.backend.versions.acquire_live("policy").sampler
    return request, sampler.generate([request])[0], sampler.model.config


@pytest.mark.parametrize(("name", "gen_length"), [("sdar-tiny", 10), ("llada2-tiny", 70), ("shifted", 10)])
def test_a_block_causal_checkpoint_is_served_streamed_and_live(serve, shared, tmp_path, name, gen_length):
    """The tail of a prompt of five tokens is in the first block. The last block extends past the completion."""
    directory = shared / "fixtures" / name
    if name == "shifted":
        original = shared / "fixtures" / "sdar-tiny"
        directory = adapted(original, tmp_path / "a2d", "a2d-qwen3", right_shift_logits=True)
    service, client = serve(directory)
    body = ASK | {"diffusion": {"gen_length": gen_length, "return_step_map": True}}
    request, expected, config = asked(service, body)
    assert (request.params.block_length, len(request.prompt_ids) % request.params.block_length) != (0, 0)
    answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    ids = expected.token_ids[: expected.num_tokens].tolist()
    assert choice["diffusion"]["token_ids"] == ids
    assert choice["text"] == service.codec.decode(ids)
    canvas = canvas_of(request, config)
    num_blocks = -(-canvas.end // canvas.block_length) - canvas.prompt_length // canvas.block_length
    assert len(expected.token_ids) == canvas.num_slots, "nothing ends it"
    usage = answer["usage"]["diffusion"]
    assert (usage["num_forwards"], usage["num_blocks"]) == (expected.num_forwards, num_blocks)
    chunks, is_done = events_of(client.post("/v1/completions", json=body | STREAM))
    assert (is_done, chunks[-1]["usage"]) == (True, answer["usage"])
    texts = [one["text"] for chunk in chunks for one in chunk["choices"] if one["text"]]
    assert "".join(texts) == choice["text"]
    assert len(texts) > 1, "block by block"
    live = body | {"stream": True, "diffusion": body["diffusion"] | {"stream": "canvas"}}
    chunks, is_done = events_of(client.post("/v1/completions", json=live))
    frames = [one for chunk in chunks for one in chunk["choices"]]
    assert is_done
    assert {len(frame["diffusion"]["slots"]) for frame in frames} == {gen_length}
    first, *_, last = (frame["diffusion"] for frame in frames)
    assert all(slot["masked"] for slot in first["slots"])
    assert [slot["step"] for slot in last["slots"]] == expected.step_map[:gen_length].tolist()
    assert (last["step"], last["num_steps"]) == (expected.num_forwards, None)
    assert frames[-1]["text"] == choice["text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_another_family_is_served_as_it_is_published(serve, tmp_path, family):
    publish(tmp_path, family)
    service, client = serve(tmp_path / "model")
    body = ASK | {"diffusion": {"gen_length": 8, "return_step_map": True}}
    _, expected, config = asked(service, body)
    assert config.family == family
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["diffusion"]["token_ids"] == expected.token_ids[: expected.num_tokens].tolist()
    chunks, is_done = events_of(client.post("/v1/completions", json=body | STREAM))
    assert is_done
    assert "".join(one["text"] for chunk in chunks for one in chunk["choices"]) == choice["text"]


def test_stop_ids_of_generation_config_end_a_text(serve, shared, tmp_path):
    original = shared / "fixtures" / "sdar-tiny"
    directory = shutil.copytree(original, tmp_path / "sdar", copy_function=shutil.copyfile)
    service, client = serve(original)
    assert set(service.codec.config.stop_ids) == {506, 509}
    body = ASK | {"diffusion": {"gen_length": 16, "return_step_map": True}}
    free = client.post("/v1/completions", json=body).json()["choices"][0]["diffusion"]["token_ids"]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [509, free[5]]}))
    ended = serve(directory)[1].post("/v1/completions", json=body).json()["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert ended["diffusion"]["token_ids"] == free[: free.index(free[5]) + 1]


def test_num_steps_is_known_unless_a_block_begins_in_the_prompt(serve, shared):
    service, _ = serve(shared / "fixtures" / "sdar-tiny")
    shares = {"gen_length": 8, "steps": 4, "remasking": "quota"}
    plans = [
        service.planner.plan(CompletionRequest(prompt=prompt, seed=1, diffusion=shares))
        for prompt in ([7] * 4, [7] * 5)
    ]
    assert [plan.num_steps(0) for plan in plans] == [4, None]
    # By hand: two slots a step. After the tail of one token there are blocks of 3, 4 and 4 masks.
    for plan, num_steps in zip(plans, (4, 6), strict=True):
        sampler = service.backend.versions.acquire_live("policy").sampler
        forever = dataclasses.replace(
            plan.masked_requests[0], params=plan.masked_requests[0].params.model_copy(update={"stop_ids": ()})
        )
        assert sampler.generate([forever])[0].num_forwards == num_steps


def test_fields_of_policies_without_a_mask_token_are_refused(client):
    ask = {"prompt": [5], "diffusion": {"t_max": 0.5}}
    error = assert_error(client.post("/v1/completions", json=ask), 400)
    assert error["param"] == "diffusion.t_max"
    assert error["message"].startswith("diffusion.t_max is for policies without a mask token")
