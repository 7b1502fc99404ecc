"""Constrained decoding: completions are texts of the grammar, sampled from the tokens that it allows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.grammar.grammar import NOWHERE, Grammar
from rollout.request import Completion, FinishReason, Request, SamplingParams, canvas_grammar_of
from rollout.sampler import Sampler
from tests.rollout.ragged import sharp_policy

VOCAB, MASK, EOS = 40, 38, 39
OPEN, CLOSE = 7, 9
PARAMS: dict[str, Any] = {"gen_length": 16, "block_length": 8, "num_denoise_steps": 8, "temperature": 1.0}
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"num_denoise_steps": 2},
    {"schedule": "random"},
    {"schedule": "left_to_right"},
    {"schedule": "left_to_right", "threshold": 0.2},
    {"threshold": 0.2},
    {"factor": 1.0},
    {"entropy_bound": 2.0},
    {"temperature": 0.0},
    {"drawing": "sample_then_select"},
    {"top_p": 0.5},
    {"cfg_scale": 1.0},
    {"cache": "prefix"},
    {"cache": "dual", "cache_refresh_steps": 2},
]


def pairs(most_tokens: int = 16) -> Grammar:
    """A grammar of `OPEN x x CLOSE`, once or more. Each x is a token from 0 to 5, and both of a pair are even or both
    odd."""
    class_of = np.full(VOCAB, 4, dtype=np.int32)
    class_of[[OPEN, CLOSE]] = 2, 3
    class_of[:6] = [0, 1, 0, 1, 0, 1]
    next_state = np.full((6, 5), NOWHERE, dtype=np.int16)
    next_state[[0, 5], 2] = 1
    next_state[1, [0, 1]] = 2, 3
    next_state[2, 0] = next_state[3, 1] = 4
    next_state[4, 3] = 5
    accepting = np.array([False] * 5 + [True])
    return Grammar(class_of=class_of, next_state=next_state, accepting=accepting, most_tokens=most_tokens)


def expect_pairs(completion: Completion, most: int = 16) -> None:
    tokens = completion.token_ids[: completion.num_tokens].tolist()
    if completion.finish_reason is FinishReason.EOS:
        assert tokens.pop() == EOS
    assert 0 < len(tokens) <= most
    assert len(tokens) % 4 == 0
    for at in range(0, len(tokens), 4):
        first, one, two, last = tokens[at : at + 4]
        assert (first, last) == (OPEN, CLOSE)
        assert max(one, two) < 6
        assert one % 2 == two % 2


def request(seed: int = 0, grammar: Grammar | None = None, **changes: Any) -> Request:
    return Request(
        prompt_ids=(3, 1, 4), params=SamplingParams(**PARAMS | changes), seed=seed, grammar=grammar or pairs()
    )


@pytest.mark.parametrize("changes", SCHEDULES, ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_a_completion_is_a_text_of_its_grammar(policy: Transformer, changes: dict[str, Any], static: bool) -> None:
    sampler = Sampler(policy, 0, EngineConfig(num_slots=3, static_shapes=static))
    completions = sampler.generate([request(seed, **changes) for seed in range(6)])
    for completion in completions:
        expect_pairs(completion)
        assert MASK not in completion.token_ids
    texts = {tuple(completion.token_ids[: completion.num_tokens].tolist()) for completion in completions}
    assert len(texts) == 1 if changes.get("temperature") == 0.0 else len(texts) > 1


@pytest.mark.parametrize("steps_per_sync", [1, 4])
def test_the_grammar_holds_between_synchronizations(policy: Transformer, steps_per_sync: int) -> None:
    sampler = Sampler(policy, 0, EngineConfig(num_slots=4, steps_per_sync=steps_per_sync))
    for completion in sampler.generate([request(seed) for seed in range(4)]):
        expect_pairs(completion)


def test_the_grammar_holds_for_a_block_causal_policy(config: TransformerConfig) -> None:
    sampler = Sampler(sharp_policy(config, 4.0), 0)
    # Blocks are counted from the prompt's first token, so that the last one extends past `gen_length`.
    for changes in ({"steps_per_block": 2}, {"steps_per_block": 4, "threshold": 0.9}, {"steps_per_block": 1}):
        completions = sampler.generate([request(seed, block_length=4, **changes) for seed in range(4)])
        for completion in completions:
            expect_pairs(completion)


def test_slots_beyond_gen_length_are_no_part_of_the_text(config: TransformerConfig) -> None:
    """The last block may extend past `gen_length`, but a text may not."""
    grammar = pairs(2**31 - 1)
    sampler = Sampler(sharp_policy(config, 4.0), 0)
    for length in (4, 5, 6, 7):
        asked = [request(seed, grammar, gen_length=length, block_length=4, steps_per_block=4) for seed in range(4)]
        for completion in sampler.generate([replace(one, prompt_ids=(3, 1, 4, 1, 5)) for one in asked]):
            expect_pairs(completion, length)


def test_rows_with_different_end_tokens_share_no_logits(policy: Transformer) -> None:
    """`ac` or `b`, then a given c. In one row the c is text, in the other an end token, so that they allow different
    tokens before it. Their canvases are equal, and rows with equal canvases share a forward's logits."""
    a, b, c = 1, 2, 3
    moves = np.full((3, VOCAB), NOWHERE, dtype=np.int16)
    moves[0, a], moves[0, b], moves[1, c] = 1, 2, 2
    classes, accepting = np.arange(VOCAB, dtype=np.int32), np.array([False, False, True])
    grammar = Grammar(class_of=classes, next_state=moves, accepting=accepting, most_tokens=4)
    params = PARAMS | {"gen_length": 4, "block_length": 4, "num_denoise_steps": 4, "temperature": 0.0}
    own = Request(prompt_ids=(3,), params=SamplingParams(**params), seed=0, fixed_tokens={1: c}, grammar=grammar)
    other = replace(own, params=SamplingParams(**params, stop_ids=(EOS, c)))
    first, second = Sampler(policy, 0).generate([own, other])
    assert (first.token_ids[0], second.token_ids[0]) == (a, b)


def test_a_text_is_no_longer_than_its_grammar_allows(policy: Transformer) -> None:
    for most in (4, 7, 8):
        completions = Sampler(policy, 0).generate([request(seed, pairs(most)) for seed in range(4)])
        for completion in completions:
            expect_pairs(completion, most)


def test_rows_without_a_grammar_are_unaffected_by_others(policy: Transformer) -> None:
    free = [replace(request(seed), grammar=None) for seed in range(3)]
    alone = Sampler(policy, 0).generate(free)
    mixed = Sampler(policy, 0).generate([part for seed, one in enumerate(free) for part in (request(seed), one)])[1::2]
    for one, other in zip(alone, mixed, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.step_map.tolist() == other.step_map.tolist()
        assert one.commit_logp == pytest.approx(other.commit_logp, abs=1e-5)


def test_recorded_log_probs_are_over_the_allowed_tokens(policy: Transformer) -> None:
    """Replay each step: a full forward of the canvas before it, with all disallowed tokens removed."""
    asked = request(5, num_denoise_steps=16, temperature=0.7)
    completion = Sampler(policy, 0).generate([asked])[0]
    seen = canvas_grammar_of(asked, policy.config)
    assert seen is not None
    num_denoised = len(completion.token_ids)
    for step in range(completion.step_map.max() + 1):
        is_masked = np.append(completion.step_map >= step, [True] * (16 - num_denoised))
        tokens = np.append(completion.token_ids, [0] * (16 - num_denoised)).astype(np.int64)
        seen.update(tokens, is_masked)
        canvas = torch.tensor([[*asked.prompt_ids, *np.where(is_masked, MASK, tokens).tolist()]])
        with torch.no_grad():
            logits = policy(canvas)[0, len(asked.prompt_ids) :].float()
        for slot in (completion.step_map == step).nonzero()[0]:
            is_allowed = torch.from_numpy(seen.allowed(int(slot))[seen.class_of_V])
            distribution = logits[slot].masked_fill(~is_allowed, -torch.inf)
            token = int(tokens[slot])
            assert completion.commit_logp_raw[slot] == pytest.approx(
                float(distribution.log_softmax(-1)[token]), abs=1e-4
            )
            assert completion.commit_logp[slot] == pytest.approx(
                float((distribution / 0.7).log_softmax(-1)[token]), abs=1e-4
            )


def test_a_draw_that_conflicts_with_another_is_postponed(policy: Transformer) -> None:
    """Committing all slots at once would pair even and odd tokens, so that more steps are needed."""
    completions = Sampler(policy, 0).generate([request(seed, num_denoise_steps=2) for seed in range(8)])
    assert max(int(completion.step_map.max()) for completion in completions) > 1


def test_a_row_resumes_from_its_finished_blocks(policy: Transformer) -> None:
    batch = Sampler(policy, 0).open([request(2)])
    whole = Sampler(policy, 0).generate([request(2)])[0]
    while not batch.num_committed().get(0):
        done = batch.step()
        if done:
            pytest.skip("it was done within its first block")
    committed = batch.progress([0])[0].committed
    resumed = Sampler(policy, 0).generate([replace(request(2), committed=committed)])[0]
    assert resumed.token_ids.tolist() == whole.token_ids.tolist()


def test_fixed_tokens_are_part_of_the_text(policy: Transformer) -> None:
    given = replace(request(1), fixed_tokens={1: 3, 5: 4})
    completion = Sampler(policy, 0).generate([given])[0]
    expect_pairs(completion)
    assert completion.token_ids[[1, 5]].tolist() == [3, 4]


def huge() -> Grammar:
    """A grammar with more states than a canvas supports."""
    return replace(pairs(), next_state=np.zeros((70000, 5), dtype=np.int16), accepting=np.ones(70000, dtype=bool))


SHORT = {"gen_length": 2, "block_length": 2, "num_denoise_steps": 1}
NONE_FITS = "grammar has no text that fits what is given or forbidden"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"grammar": pairs(3)}, "grammar needs 4 tokens at least, and the completion has room for 3"),
        ({"params": SamplingParams(**PARAMS | SHORT)}, "grammar needs 4 tokens at least, and .* has room for 2"),
        ({"fixed_tokens": {0: 3}}, NONE_FITS),
        ({"params": SamplingParams(**PARAMS, forbidden_ids=(OPEN,))}, NONE_FITS),
        ({"grammar": replace(pairs(), accepting=np.zeros(6, dtype=bool))}, "grammar has no text, and .* room for 16"),
        ({"grammar": huge()}, "grammar has an automaton of 70000 states: .* gen_length is at most 14"),
        ({"grammar": replace(pairs(), class_of=np.zeros(3, dtype=np.int32))}, "grammar has classes of 3 tokens"),
    ],
)
def test_a_grammar_without_a_possible_completion_is_refused(
    policy: Transformer, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampler(policy, 0).open([replace(request(), **changes)])
