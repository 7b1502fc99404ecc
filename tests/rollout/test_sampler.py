import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.counter import uniform
from learner.model.transformer import Transformer
from rollout.request import Completion, FinishReason, Request, SamplingParams
from rollout.sampler import Sampler, commit_quotas, draw

PARAMS = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.0)
WARM = PARAMS.model_copy(update={"temperature": 1.0})


def _requests(params: SamplingParams, count: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 9, 5, 9, 1, 12]
    prompts = [tuple(torch.randint(0, 38, (length,), generator=generator).tolist()) for length in lengths]
    return [Request(prompt_ids=prompts[i % 6], params=params, seed=100 + i) for i in range(count)]


def _slow(policy: Transformer, request: Request) -> tuple[list[int], list[int], list[float]]:
    """Sampling by the book: one row, no padding, the head everywhere, nothing shared, no early end."""
    params, config = request.params, policy.config
    tokens = [*request.prompt_ids, *[config.mask_token_id] * params.gen_length]
    start, step = len(request.prompt_ids), 0
    step_map, logps = [-1] * params.gen_length, [0.0] * params.gen_length
    for block in range(params.num_blocks):
        for quota in commit_quotas(params.block_length, params.steps_per_block):
            with torch.no_grad():
                logits = policy(torch.tensor([tokens]))[0, start:]
            logits[:, config.mask_token_id] = -torch.inf
            slots = [
                s for s in range(block * params.block_length, (block + 1) * params.block_length) if step_map[s] < 0
            ]
            confidence = logits.softmax(-1).amax(-1)
            for slot in sorted(slots, key=lambda s: (-confidence[s].item(), s))[:quota]:
                if params.temperature == 0:
                    token, logp = int(logits[slot].argmax()), 0.0
                else:
                    law = (logits[slot] / params.temperature).softmax(-1)
                    u = uniform(torch.tensor(request.seed), step, slot).item()
                    token = int((law.double().cumsum(0) <= u * law.double().sum()).sum())
                    logp = law[token].log().item()
                tokens[start + slot], step_map[slot], logps[slot] = token, step, logp
            step += 1
    return tokens[start:], step_map, logps


def _check_equal(completion: Completion, slow: tuple[list[int], list[int], list[float]]) -> None:
    denoised = len(completion.token_ids)
    assert completion.token_ids.tolist() == slow[0][:denoised]
    assert completion.step_map.tolist() == slow[1][:denoised]
    assert completion.commit_logp == pytest.approx(slow[2][:denoised], abs=1e-4)


@pytest.mark.parametrize("params", [PARAMS, WARM, WARM.model_copy(update={"num_denoise_steps": 2})])
def test_a_ragged_batch_is_the_slow_sampler_row_by_row(policy: Transformer, params: SamplingParams) -> None:
    requests = _requests(params)
    for request, completion in zip(requests, Sampler(policy, 7).generate(requests), strict=True):
        _check_equal(completion, _slow(policy, request))
        assert completion.policy_version == 7


def test_completions_do_not_depend_on_their_neighbours(policy: Transformer) -> None:
    requests = _requests(WARM)
    together = Sampler(policy, 0).generate(requests)
    for request, completion in zip(requests, together, strict=True):
        (alone,) = Sampler(policy, 0).generate([request])
        assert alone.token_ids.tolist() == completion.token_ids.tolist()
    backwards = Sampler(policy, 0).generate(requests[::-1])
    assert [c.token_ids.tolist() for c in backwards[::-1]] == [c.token_ids.tolist() for c in together]


def test_a_group_has_different_samples_and_a_seed_always_the_same(policy: Transformer) -> None:
    params = WARM.model_copy(update={"temperature": 2.0})
    group = [replace(_requests(params)[0], seed=seed) for seed in (1, 2, 3, 1)]
    texts = [completion.token_ids.tolist() for completion in Sampler(policy, 0).generate(group)]
    assert texts[0] == texts[3]
    assert len({tuple(text) for text in texts}) == 3


def test_replaying_tokens_and_step_map_gives_the_recorded_logps(policy: Transformer) -> None:
    """Full forwards over the states that the step map describes, read at the slots committed there."""
    params = WARM.model_copy(update={"temperature": 0.7})
    for request, completion in zip(_requests(params), Sampler(policy, 0).generate(_requests(params)), strict=True):
        final = np.full(params.gen_length, policy.config.mask_token_id)
        final[: len(completion.token_ids)] = completion.token_ids
        for step in range(completion.step_map.max() + 1):
            state = final.copy()
            hidden = np.concatenate([completion.step_map, np.full(16 - len(completion.step_map), 99)]) >= step
            state[hidden] = policy.config.mask_token_id
            with torch.no_grad():
                logits = policy(torch.tensor([[*request.prompt_ids, *state.tolist()]]))[0, len(request.prompt_ids) :]
            logits[:, policy.config.mask_token_id] = -torch.inf
            for slot in (completion.step_map == step).nonzero()[0]:
                token = completion.token_ids[slot]
                raw = logits[slot].log_softmax(-1)
                tempered = (logits[slot] / 0.7).log_softmax(-1)[token].item()
                assert completion.commit_logp[slot] == pytest.approx(tempered, abs=1e-5)
                assert completion.commit_logp_raw[slot] == pytest.approx(raw[token].item(), abs=1e-5)
                entropy = torch.special.entr(raw.exp()).sum().item()
                assert completion.commit_entropy[slot] == pytest.approx(entropy, abs=1e-5)


def test_draws_follow_softmax() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf])
    tokens, logps = draw(logits.expand(40_000, -1), 0.8, uniform(torch.tensor(1), torch.arange(40_000)))
    law = (logits / 0.8).softmax(-1)
    counts = torch.bincount(tokens, minlength=5).float()
    assert counts[4] == 0
    chi_square = ((counts - 40_000 * law)[:4] ** 2 / (40_000 * law[:4])).sum().item()
    assert chi_square < 16.3, "3 degrees of freedom, p = 0.001"
    torch.testing.assert_close(logps, law.log()[tokens])


def test_the_recorded_logp_is_unbiased(policy: Transformer) -> None:
    """Select, then sample: E[logp + entropy] is 0. Sampling first and keeping the probable samples is biased up."""
    prompt = _requests(WARM)[1]
    params = WARM.model_copy(update={"num_denoise_steps": 16})
    completions = Sampler(policy, 0).generate([replace(prompt, seed=seed, params=params) for seed in range(600)])
    excess = np.concatenate([c.commit_logp + c.commit_entropy for c in completions])
    assert abs(excess.mean()) < 4 * excess.std() / math.sqrt(len(excess))


def test_the_mask_id_is_never_emitted(policy: Transformer) -> None:
    with torch.no_grad():
        policy.head.weight[policy.config.mask_token_id] = 10 * policy.head.weight.abs().amax()
    completions = Sampler(policy, 0).generate(_requests(PARAMS) + _requests(PARAMS))
    assert all((completion.token_ids != policy.config.mask_token_id).all() for completion in completions)


def test_a_row_ends_with_the_block_of_its_first_end_of_text(policy: Transformer) -> None:
    params = SamplingParams(gen_length=32, block_length=4, num_denoise_steps=16, temperature=3.0)
    completions = Sampler(policy, 0).generate([replace(_requests(params)[2], seed=seed) for seed in range(40)])
    eos_id = policy.config.eos_token_id
    ended = [completion for completion in completions if completion.finish_reason is FinishReason.EOS]
    assert 0 < len(ended) < 40
    for completion in completions:
        text = completion.token_ids[: completion.num_tokens]
        assert (text[:-1] != eos_id).all()
        if completion.finish_reason is FinishReason.EOS:
            assert text[-1] == eos_id
            assert len(completion.token_ids) == -(-completion.num_tokens // 4) * 4
        else:
            assert completion.num_tokens == 32
        assert completion.num_forwards == len(completion.token_ids) // 4 * 2


@given(st.integers(1, 60), st.integers(1, 60))
@settings(deadline=None)
def test_quotas_are_even_and_the_earliest_steps_take_the_rest(num_slots: int, num_steps: int) -> None:
    quotas = commit_quotas(num_slots, num_steps)
    assert sum(quotas) == num_slots
    assert len(quotas) == num_steps
    assert quotas == sorted(quotas, reverse=True)
    assert max(quotas) - min(quotas) <= 1


def test_tokens_are_those_of_the_original_d1_sampler(shared) -> None:  # type: ignore[no-untyped-def]
    import json

    from learner.model.checkpoint import load_policy

    directory = shared / "fixtures" / "llada-tiny"
    policy = load_policy(directory)
    # d1's sampler does not stop at end of text.
    object.__setattr__(policy, "config", policy.config.model_copy(update={"eos_token_id": -1}))
    for case in json.loads((directory / "expected_generations.json").read_text()):
        params = SamplingParams(
            gen_length=case["gen_length"],
            block_length=case["block_length"],
            num_denoise_steps=case["steps"],
            temperature=0,
        )
        requests = [Request(prompt_ids=tuple(prompt), params=params, seed=0) for prompt in case["prompt"]]
        completions = Sampler(policy, 0).generate(requests)
        assert [completion.token_ids.tolist() for completion in completions] == case["output"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_length": 7}, "block_length 7 does not divide gen_length 16"),
        ({"num_denoise_steps": 3}, "num_denoise_steps 3 must be a multiple of the 2 blocks"),
        ({"num_denoise_steps": 32}, "at most gen_length 16"),
    ],
)
def test_schedules_that_do_not_divide_are_refused(changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**PARAMS.model_dump() | changes)
