"""`d1 sample` of a renoising policy, which has no mask token (DiffusionGemma)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.capacity.shape import policy_shape
from deploy.errors import UserError
from deploy.export import export_policy
from deploy.recipe.overrides import load_recipe
from learner.estimators.renoised import kept_logps
from learner.model.checkpoint import load_policy
from learner.model.renoising.policy import load_renoising_policy
from learner.model.renoising.record import DenoisedCanvas
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from rollout.renoising.request import RenoisingParams
from tests.tiny_renoising import make_renoising_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_renoising_checkpoint(tmp_path_factory.mktemp("gemma") / "bare")


REQUESTS = [
    {"prompt_ids": [5, 6, 7], "gen_length": 12, "steps": 4, "entropy_bound": 2.0, "id": "a"},
    {"prompt_ids": [5, 6, 7], "gen_length": 12, "steps": 4, "entropy_bound": 2.0, "seed": 3},
    {"prompt_ids": [5], "t_min": 0.9},
    {"prompt_ids": [60]},
    {"prompt_ids": [5], "threshold": 0.5},
    {"prompt_ids": [5], "steps": 0},
    {"prompt": "Why?"},
    {"gen_length": 4},
    [1],
]
ERRORS = [
    "t_min 0.9 is above t_max 0.8",
    "prompt_ids has 60; the policy's token ids are 0 to 59",
    "threshold is not for diffusion_gemma policies; they take gen_length, steps, ",
    "steps is 0; it should be greater than 0",
    "prompt is text, and",
    "there is no prompt; give prompt, messages or prompt_ids",
    "",
]


def test_a_file_is_answered_with_the_record_that_the_likelihood_is_of(
    d1: Callable, checkpoint: Path, workdir: Path
) -> None:
    (workdir / "r").write_text("\n".join(map(json.dumps, REQUESTS)))
    ended = d1("sample", str(checkpoint), "--requests", "r", "--json", "stop_ids=[]")
    assert ended.status == 2
    answers = [json.loads(line) for line in ended.out.splitlines()]
    assert [answer["index"] for answer in answers] == list(range(len(REQUESTS)))
    for answer, said in zip(answers[2:], ERRORS, strict=True):
        assert answer["error"].startswith(said)
        assert f"d1: request {answer['index']} (line {answer['index'] + 1}): {answer['error']}" in ended.err
    first, second = answers[:2]
    assert (first["id"], first["num_tokens"], first["finish_reason"], first["text"]) == ("a", 12, "length", None)
    assert first["token_ids"] != second["token_ids"]
    params = RenoisingParams(gen_length=12, max_denoise_steps=4)
    canvases = [
        DenoisedCanvas(
            seen=np.array(canvas["seen"], dtype=np.int32),
            drawn=np.array(canvas["drawn"], dtype=np.int32),
            drawn_logp=np.array(canvas["drawn_logp"], dtype=np.float32),
            accepted=np.array(canvas["accepted"]),
            argmax=np.array(canvas["argmax"], dtype=np.int32),
            mean_entropy=np.array(canvas["mean_entropy"], dtype=np.float32),
            temperatures=np.array([params.temperature(n) for n in range(len(canvas["seen"]))], dtype=np.float32),
        )
        for canvas in first["canvases"]
    ]
    with torch.no_grad():
        logps = kept_logps(load_renoising_policy(checkpoint), [5, 6, 7], canvases)
    recorded = np.concatenate([canvas.drawn_logp[canvas.accepted] for canvas in canvases])
    assert logps.numpy() == pytest.approx(recorded, abs=1e-4)
    assert first["num_forwards"] == sum(canvas.num_steps for canvas in canvases)


def test_a_prompt_is_answered_with_text_and_other_options_are_refused(
    d1: Callable, tmp_path: Path, workdir: Path
) -> None:
    checkpoint = make_renoising_checkpoint(tmp_path / "spoken")
    # The tokenizer has more tokens than the policy, but this prompt has small ids.
    make_tokenizer(["a b"], checkpoint, 280)
    ended = d1("sample", str(checkpoint), "!", "gen_length=8", "steps=3", "--raw")
    assert (ended.status, ended.err.endswith("3 forwards, 2.7 tokens a forward, length\n")) == (0, True), ended.err
    assert ended.out.strip()
    assert d1("sample", str(checkpoint), "!", "gen_length=8", "steps=3", "--raw").out == ended.out
    for option in ("threshold", "steps_per_block"):
        refused = d1("sample", str(checkpoint), "!", f"{option}=1")
        assert refused.status == 2
        assert f"{option} is not for diffusion_gemma policies; they take gen_length, steps" in refused.err
    refused = d1("sample", str(checkpoint), "!", "gen_length=800", "--raw")
    assert (refused.status, "the policy takes at most 64" in refused.err) == (2, True)


def test_nothing_that_the_policy_or_a_file_says_steers_the_terminal(
    d1: Callable, tmp_path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_renoising_checkpoint(tmp_path / "spoken")
    make_tokenizer(["a b"], checkpoint, 280)
    monkeypatch.setattr(ChatTokenizer, "decode", lambda *_: "a\x1b]0;mine\x07b")
    (workdir / "r").write_text("\n".join(['{"prompt": "!", "gen_length": 8, "steps": 1}', '{"\x9b2J": 1}']))
    ended = d1("sample", str(checkpoint), "--requests", "r")
    assert "a\\u001b]0;mine\\u0007b\n" in ended.out
    assert "\\u009b2J is not a key of a request" in ended.err
    assert not {"\x1b", "\x07", "\x9b"} & {*ended.out, *ended.err}


def test_half_of_a_surrogate_pair_is_refused_and_the_rest_of_the_file_answered(
    d1: Callable, tmp_path: Path, workdir: Path
) -> None:
    checkpoint = make_renoising_checkpoint(tmp_path / "spoken")
    make_tokenizer(["a b"], checkpoint, 280)
    halves = [{"prompt": "\ud800"}, {"messages": [{"role": "user", "content": "\udfff"}]}]
    requests = [*halves, {"prompt": "!", "gen_length": 8, "steps": 1}]
    (workdir / "r").write_text("\n".join(map(json.dumps, requests)))
    ended = d1("sample", str(checkpoint), "--requests", "r", "--json")
    answers = [json.loads(line) for line in ended.out.splitlines()]
    assert ended.status == 2
    assert answers[0]["error"].startswith("prompt has half of a surrogate pair")
    assert answers[1]["error"].startswith("messages has half of a surrogate pair")
    assert answers[2]["num_tokens"]
    d1("sample", str(checkpoint), "\udcff").assert_refused("the prompt has half of a surrogate pair")


def test_fields_of_the_other_policy_family_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    said = "model_type 'diffusion_gemma': it has no mask token .* `d1 serve` serves it and `d1 eval` evaluates it"
    with pytest.raises(ValueError, match=said):
        load_policy(checkpoint)
    with pytest.raises(UserError, match=said):
        export_policy(str(checkpoint), tmp_path / "out")
    recipe = load_recipe(Path("recipes/block.yaml"), [f"model.checkpoint={checkpoint}"])
    with pytest.raises(ValueError, match=said):
        policy_shape(recipe)
