"""`d1 eval` of a renoising policy, which has no mask token (DiffusionGemma)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.offline.item import Batch
from learner.model.renoising.policy import load_renoising_policy
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.renoising.sampler import RenoisingSampler
from tests.tiny_renoising import make_renoising_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_renoising_checkpoint(tmp_path_factory.mktemp("gemma") / "tiny", 300)
    make_tokenizer(["1 + 2 ="], directory, 300)
    return directory


@pytest.fixture
def evaluate(d1: Callable, checkpoint: Path, workdir: Path) -> Callable:
    """`d1 eval CHECKPOINT ...` of four digit sums, with answers below `workdir`."""

    def run(*words: str, out: str = "out") -> object:
        return d1("eval", str(checkpoint), "--tasks", "sums", "--problems", "4", "--out", str(workdir / out), *words)

    return run


def test_answers_are_those_of_the_renoising_sampler(
    evaluate: Callable, inline: list[Batch], checkpoint: Path, workdir: Path
) -> None:
    schedules = "steps=3,entropy_bound=2.5"
    ended = evaluate("--lengths", "12", "--schedules", schedules, "--samples", "2", "--seed", "7", "--json")
    assert ended.status == 0, ended.err
    cells = json.loads(ended.out)["cells"]
    assert [(cell["gen_length"], cell["schedule"], cell["temperature"], cell["answers"]) for cell in cells] == [
        (12, "3 steps a canvas, entropy bound 0.1", None, "sums.12.3-steps-a-canvas-entropy-bound-0.1.2-samples.jsonl"),
        (
            12,
            "48 steps a canvas, entropy bound 2.5",
            None,
            "sums.12.48-steps-a-canvas-entropy-bound-2.5.2-samples.jsonl",
        ),
    ]
    sampler, tokenizer = RenoisingSampler(load_renoising_policy(checkpoint), 0), ChatTokenizer(checkpoint)
    params = RenoisingParams(gen_length=12, max_denoise_steps=3)
    asked = [request for batch in inline[: len(inline) // 2] for request in batch.requests]
    assert [request.params for request in asked] == [params] * 8
    again = [RenoisingRequest(prompt_ids=one.prompt_ids, params=params, seed=one.seed) for one in asked]
    rows = [json.loads(line) for line in (workdir / "out" / cells[0]["answers"]).read_text().splitlines()][1:]
    found = sampler.generate(again)
    texts = [tokenizer.decode(one.token_ids[: one.num_tokens].tolist()) for one in found]
    assert [row["generation"] for row in rows] == texts
    assert [row["num_forwards"] for row in rows] == [one.num_forwards for one in found]
    assert len(set(texts)) > 4, "samples of a problem are draws of their own"
    assert tokenizer.decode(list(asked[0].prompt_ids)).endswith(rows[0]["question"])


@pytest.mark.usefixtures("inline")
def test_two_evaluations_are_compared(evaluate: Callable, d1: Callable, workdir: Path) -> None:
    words = ("--lengths", "8", "--schedules", "steps=2", "--samples", "2")
    assert evaluate(*words).status == 0
    table = evaluate(*words, out="other").out
    assert "2 samples of each" in table
    assert "2 steps a canvas, entropy bound 0.1" in table
    compared = d1("compare", str(workdir / "out"), str(workdir / "other"))
    assert compared.status == 0, compared.err
    assert "sums, 8 slots, 2 steps a canvas, entropy bound 0.1: no difference can be told" in compared.out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--schedules", "0.5"), ("--schedules 0.5 is no schedule of diffusion_gemma policies", "steps=48")),
        (("--schedules", "threshold=0.9"), ("no schedule of diffusion_gemma", "entropy_bound=0.1")),
        (("--schedules", "steps=0"), ("--schedules: steps is 0", "greater than 0")),
        (("--temperature", "0.7"), ("--temperature 0.7 is not for diffusion_gemma policies",)),
        (("--protocol", "d1", "--tasks", "sudoku"), ("--protocol d1 fills masked slots",)),
        (("--block-length", "4"), ("--block-length 4 is not the 8 slots of this policy's canvases",)),
        # In whole canvases of 8, after a prompt of 7 tokens.
        (("--lengths", "57"), ("sums at 57 slots", "the policy takes 64 in all; take a length of at most 56")),
    ],
)
def test_invalid_renoising_options_are_refused(
    evaluate: Callable, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    evaluate(*words).assert_refused(*parts)


def test_several_samples_at_temperature_0_are_refused_for_masked_policies(d1: Callable, runs: Path) -> None:
    refused = d1("eval", "tiny", "--runs-dir", str(runs), "--samples", "2")
    refused.assert_refused("--samples 2 of the likeliest tokens are all alike; say --temperature, as in 0.8")
