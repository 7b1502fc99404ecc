"""Sampler of block-causal policies against the original code's generations and slow.py."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.model.checkpoint import load_policy
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.field_error import FieldError
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler
from tests.rollout.ragged import ragged_requests, sharp_policy
from tests.rollout.slow import sample
from tests.rollout.test_sampler import SCHEDULES, _check_equal

OTHER_BLOCKS = pytest.mark.filterwarnings("ignore:block_length .* is not the (4|32) slots")
ENGINES = {
    "remembered": EngineConfig(),
    "whole": EngineConfig(block_cache=False),
    "static, two slots": EngineConfig(num_slots=2, static_shapes=True, steps_per_sync=3),
}
BASE: dict[str, Any] = {"gen_length": 14, "block_length": 4, "steps_per_block": 2, "temperature": 1.0}
LENGTHS = (3, 9, 4, 8, 1, 12)


@pytest.fixture
def policy(config: TransformerConfig) -> Transformer:
    return sharp_policy(config, 4.0)


def _requests(**changes: Any) -> list[Request]:
    return ragged_requests(SamplingParams(**BASE | changes), LENGTHS)


def _originals(directory: Path) -> list[tuple[dict[str, Any], list[Request]]]:
    """Return the settings of a fixture, with the requests of each."""
    settings = json.loads((directory / "expected_generations.json").read_text())
    found = []
    # LLaDA2.1's loop edits tokens and is tested in test_editing.py.
    for setting in (setting for setting in settings if setting.get("loop") != "llada2.1"):
        params = SamplingParams(
            gen_length=setting["gen_length"],
            block_length=setting["block_length"],
            steps_per_block=setting["denoising_steps"],
            threshold=setting["threshold"],
            temperature=setting["temperature"],
            stop_ids=tuple(setting["stop_ids"]),
        )
        prompts = [tuple(prompt) for prompt in setting["prompt"]]
        found.append((setting, [Request(prompt_ids=prompt, params=params, seed=0) for prompt in prompts]))
    return found


def _without_mask_id(policy: Transformer, request: Request, setting: dict[str, Any], row: int) -> np.ndarray:
    """Return the original's log-probabilities renormalized without the mask id, which theirs includes."""
    tokens, steps = torch.tensor(setting["output"][row]), torch.tensor(setting["step_map"][row])
    prompt, mask_id = torch.tensor(request.prompt_ids), policy.config.mask_token_id
    num_steps, slots = int(steps.max()) + 1, torch.arange(len(tokens))
    shown = torch.where(steps >= torch.arange(num_steps)[:, None], mask_id, tokens)
    canvases = torch.cat((prompt.expand(num_steps, -1), shown), dim=1)
    with torch.no_grad():
        logits = policy(canvases, block_lengths_B=torch.full((num_steps,), request.params.block_length))
    of_mask = logits[steps, len(prompt) + slots].softmax(-1)[:, mask_id]
    return np.array(setting["commit_logp"][row]) - torch.log1p(-of_mask).numpy()


def _check_original(completion: Completion, setting: dict[str, Any], row: int, logps: np.ndarray) -> None:
    assert completion.token_ids.tolist() == setting["output"][row]
    assert completion.step_map.tolist() == setting["step_map"][row]
    assert completion.num_forwards == setting["num_denoise_forwards"][row]
    assert completion.commit_logp_raw == pytest.approx(logps, abs=1e-4)
    assert completion.exact


@OTHER_BLOCKS
@pytest.mark.parametrize(("name", "num"), [("sdar-tiny", 6), ("sdar-moe-tiny", 4), ("llada2-tiny", 5)])
def test_generations_equal_the_original_codes(shared: Path, name: str, num: int) -> None:
    """Each request alone, and on each engine all requests of all settings in one batch, with block lengths from 4 to
    32."""
    directory = shared / "fixtures" / name
    policy, settings = load_policy(directory), _originals(directory)
    assert len(settings) == num
    logps = {
        (number, row): _without_mask_id(policy, request, setting, row)
        for number, (setting, requests) in enumerate(settings)
        for row, request in enumerate(requests)
    }
    for number, (setting, requests) in enumerate(settings):
        for row, request in enumerate(requests):
            (alone,) = Sampler(policy, 0).generate([request])
            _check_original(alone, setting, row, logps[number, row])
    for engine in ENGINES.values():
        mixed = iter(Sampler(policy, 0, engine).generate([request for _, some in settings for request in some]))
        for number, (setting, requests) in enumerate(settings):
            for row in range(len(requests)):
                _check_original(next(mixed), setting, row, logps[number, row])


FITTING = {name: changes for name, changes in SCHEDULES.items() if name != "two steps"} | {
    "one step": {"steps_per_block": 1},
    "a step for each slot": {"steps_per_block": 4},
    "three steps": {"steps_per_block": 3},
    "shares above a threshold": {"threshold": 0.3, "steps_per_block": 2},
    "a threshold alone": {"threshold": 0.3, "steps_per_block": None},
    "shares of all steps": {"num_denoise_steps": 8, "steps_per_block": None, "gen_length": 16},
    "longer blocks": {"block_length": 6, "gen_length": 13},
}


@OTHER_BLOCKS
@pytest.mark.parametrize("changes", FITTING.values(), ids=FITTING)
def test_a_ragged_batch_equals_the_slow_sampler(policy: Transformer, changes: dict[str, Any]) -> None:
    requests = _requests(**changes)
    expected = [sample(policy, request) for request in requests]
    for engine in ENGINES.values():
        completions = Sampler(policy, 7, engine).generate(requests)
        for request, completion, slow in zip(requests, completions, expected, strict=True):
            _check_equal(completion, slow)
            assert completion.exact
            if completion.finish_reason == "length":
                assert completion.num_tokens == request.params.gen_length
                assert (len(request.prompt_ids) + len(completion.token_ids)) % request.params.block_length == 0


SHIFTED: dict[str, dict[str, Any]] = {
    "blocks of four": {},
    "blocks of one": {"block_length": 1, "steps_per_block": 1},
    "a threshold": {"threshold": 0.3, "steps_per_block": None},
    "edited": {
        "gen_length": 5,
        "threshold": 0.3,
        "editing_threshold": 0.5,
        "max_post_steps": 2,
        "steps_per_block": None,
    },
}


@OTHER_BLOCKS
@pytest.mark.parametrize("changes", SHIFTED.values(), ids=SHIFTED)
def test_a_shifted_policy_equals_the_slow_sampler(config: TransformerConfig, changes: dict[str, Any]) -> None:
    """The preceding column comes from the KV cache or is recomputed; both must match the reference, which runs whole
    canvases."""
    policy, requests = sharp_policy(config, 4.0, predicts_next=True), _requests(**changes)
    for engine in ENGINES.values():
        for request, completion in zip(requests, Sampler(policy, 7, engine).generate(requests), strict=True):
            _check_equal(completion, sample(policy, request))
            assert completion.exact


def test_a_shifted_policy_runs_one_extra_column(config: TransformerConfig) -> None:
    request = replace(_requests(steps_per_block=4, stop_ids=())[1], prompt_ids=(1,) * 9)
    sampler = Sampler(sharp_policy(config, 4.0, predicts_next=True), 0)
    sampler.generate([request])
    assert sampler.counts.num_tokens == 12 + 2 * 5 + 3 * (8 + 3 * 5)


def test_rows_change_blocks_between_synchronizations(policy: Transformer) -> None:
    requests = _requests(steps_per_block=2)
    for static in (False, True):
        engine = EngineConfig(block_cache=False, static_shapes=static, steps_per_sync=5)
        for request, completion in zip(requests, Sampler(policy, 7, engine).generate(requests), strict=True):
            _check_equal(completion, sample(policy, request))


def test_a_step_runs_only_its_block_and_the_uncached_one_before(policy: Transformer) -> None:
    request = replace(_requests(steps_per_block=4, stop_ids=())[1], prompt_ids=(1,) * 9)
    sampler = Sampler(policy, 0)
    sampler.generate([request])
    # The prompt's two blocks and the third block's first step; its other steps; five steps of each of the next three.
    assert sampler.counts.num_tokens == 12 + 2 * 4 + 3 * (8 + 3 * 4)
    whole = Sampler(policy, 0, EngineConfig(block_cache=False))
    whole.generate([request])
    assert whole.counts.num_tokens == 3 * 12 + 4 * (16 + 20 + 24)


def test_the_completions_of_a_problem_share_the_forward_over_its_prompt(policy: Transformer) -> None:
    """Between two other problems, so that the rows which share a forward are not the first ones."""
    first, second, third = _requests(temperature=1.3, stop_ids=())[:3]
    group = [replace(second, seed=seed) for seed in range(4)]
    requests = [first, *group, third]
    sampler, alone = Sampler(policy, 7), Sampler(policy, 7)
    for request, completion in zip(requests, sampler.generate(requests), strict=True):
        alone.generate([request])
        _check_equal(completion, sample(policy, request))
    # Three fewer forwards over the two blocks of the prompt and the third.
    assert sampler.counts.num_rows == alone.counts.num_rows - 3


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_request_resumes_from_its_finished_blocks(policy: Transformer, engine: EngineConfig) -> None:
    """Resume at the end of every block, between other requests."""
    (request,) = _requests(temperature=1.3, stop_ids=())[1:2]
    (whole,) = Sampler(policy, 0, engine).generate([request])
    batch = Sampler(policy, 0, engine).open([request])
    seen = set()
    while not any(batch.step()):
        committed = batch.progress([0])[0].committed
        if len(committed) in seen:
            continue
        seen.add(len(committed))
        again = Sampler(policy, 0, engine).generate([*_requests()[2:4], replace(request, committed=committed)])[-1]
        assert again.token_ids.tolist() == whole.token_ids.tolist()
        assert again.step_map.tolist() == whole.step_map.tolist()
        np.testing.assert_allclose(again.commit_logp, whole.commit_logp, atol=2e-5)
    assert seen >= {0, 3, 7, 11}


def test_fixed_tokens_may_fill_whole_blocks(policy: Transformer) -> None:
    """A block without any slot to denoise must enter the KV cache too."""
    (request,) = _requests(stop_ids=())[:1]
    request = replace(request, fixed_tokens={slot: slot + 2 for slot in (0, 5, 6, 7, 8, 13)})
    for engine in ENGINES.values():
        (completion,) = Sampler(policy, 0, engine).generate([request])
        _check_equal(completion, sample(policy, request))


def test_a_reused_slot_does_not_keep_its_old_kv_cache(policy: Transformer) -> None:
    requests = _requests()
    batch = Sampler(policy, 0, EngineConfig(num_slots=1)).open(requests[1:2])
    batch.step()
    batch.step()
    batch.cancel(0)
    batch.submit(requests[3])
    completions: list[tuple[int, Completion]] = []
    while not completions:
        completions = batch.step()
    _check_equal(completions[0][1], sample(policy, requests[3]))


def test_other_stop_ids_of_the_config_end_a_completion(policy: Transformer) -> None:
    requests = _requests(temperature=2.0, gen_length=30)
    (plain, *_) = Sampler(policy, 0).generate(requests)
    token = int(plain.token_ids[6])
    policy.config = policy.config.model_copy(update={"other_stop_ids": (token,)})
    (ended, *_) = Sampler(policy, 0).generate(requests)
    first = plain.token_ids.tolist().index(token)
    assert (ended.num_tokens, ended.finish_reason) == (first + 1, "eos")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps_per_block": 5}, "steps_per_block 5 is more than the 4 slots of a block"),
        ({"cache": "dual"}, "cache dual is for bidirectional policies; a block-causal one remembers"),
        ({"gen_length": 60}, "prompt_ids of 3 and gen_length 60 in blocks of 4 make 64 tokens"),
    ],
)
def test_unsupported_parameters_are_refused(policy: Transformer, changes: dict[str, Any], sentence: str) -> None:
    if changes == {"gen_length": 60}:
        policy.config = policy.config.model_copy(update={"max_sequence_length": 63})
    with pytest.raises((FieldError, ValueError)) as refused:
        Sampler(policy, 0).generate(_requests(**changes))
    assert sentence in str(refused.value).replace("{", "").replace("}", "")


def test_an_untrained_block_length_warns_once(policy: Transformer) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        Sampler(policy, 0).generate([*_requests(block_length=6), *_requests()])
    (warning,) = told
    assert str(warning.message) == (
        "block_length 6 is not the 4 slots that the policy's config names: "
        "it may not have been trained with such blocks"
    )


def test_a_bidirectional_policy_needs_whole_blocks(config: TransformerConfig) -> None:
    bidirectional = make_model(config)
    init_weights(bidirectional, seed=0)
    with pytest.raises(ValueError, match="block_length 4 does not divide gen_length 14"):
        Sampler(bidirectional, 0).generate(_requests())
