"""Step answers against one forward of each state, on every engine, and what they leave unchanged."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.counter import uniform
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.logs.step_answers import steps_of_highest_entropy
from rollout.request import Completion, FinishReason, Request, SamplingParams
from rollout.sampler import Sampler
from tests.rollout.ragged import ragged_requests, sharp_policy

ENGINES = {
    "default": EngineConfig(),
    "few slots": EngineConfig(num_slots=2),
    "static, three steps a check": EngineConfig(num_slots=3, static_shapes=True, steps_per_sync=3),
}
BASE: dict[str, Any] = {"gen_length": 12, "block_length": 4, "num_denoise_steps": 6, "temperature": 1.0}
BASE |= {"stop_ids": (7, 11, 20, 39)}
SAMPLED = {
    "by steps": BASE,
    "by a threshold": BASE | {"threshold": 0.4},
    "one block, guided": BASE | {"block_length": 12, "cfg_scale": 0.5},
    "samples first": BASE | {"drawing": "sample_then_select", "forbidden_ids": (5, 6)},
}
LENGTHS = (3, 9, 4, 1, 9)


@pytest.fixture(scope="module")
def bidirectional(config: TransformerConfig) -> Transformer:
    model = make_model(config)
    init_weights(model, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(3.0)
    return model


def _asking(params: SamplingParams, count: int = 4) -> list[Request]:
    return [replace(request, num_step_answers=count) for request in ragged_requests(params, LENGTHS)]


def _state(completion: Completion, length: int, step: int, mask_id: int) -> torch.Tensor:
    """Return the completion's slots before a step."""
    ids = torch.full((length,), mask_id)
    is_shown = torch.from_numpy(completion.step_map) < step
    ids[: len(completion.token_ids)][is_shown] = torch.from_numpy(completion.token_ids).long()[is_shown]
    return ids


def _predicted(
    policy: Transformer, request: Request, completion: Completion, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state before a step, [S], and its logits, [S, V], from forwards of this canvas alone."""
    params, mask_id = request.params, policy.config.mask_token_id
    prompt, ids = torch.tensor(request.prompt_ids), _state(completion, params.gen_length, step, mask_id)
    with torch.no_grad():
        logits = policy(torch.cat((prompt, ids))[None])[0, len(prompt) :]
        if params.cfg_scale:
            unconditional = policy(torch.cat((torch.full_like(prompt, mask_id), ids))[None])[0, len(prompt) :]
            logits = unconditional + (1 + params.cfg_scale) * (logits - unconditional)
    logits[:, [mask_id, *params.forbidden_ids]] = -torch.inf
    return ids, logits


def _expected(policy: Transformer, request: Request, completion: Completion, step: int) -> list[int]:
    """Return the greedy completion of the state before a step."""
    ids, logits = _predicted(policy, request, completion, step)
    return torch.where(ids == policy.config.mask_token_id, logits.argmax(dim=-1), ids).tolist()


def _sampled(policy: Transformer, request: Request, completion: Completion, step: int) -> list[int]:
    """Return the state before a step with a sample in each masked slot, by the draw of this step and slot."""
    params, mask_id = request.params, policy.config.mask_token_id
    if params.temperature == 0:
        return _expected(policy, request, completion, step)
    ids, logits = _predicted(policy, request, completion, step)
    share_S = uniform(torch.tensor(request.draw_keys[0]), torch.tensor(step), torch.arange(params.gen_length))
    running_SV = (logits / params.temperature).double().softmax(dim=-1).cumsum(dim=-1)
    drawn_S = (running_SV <= share_S[:, None] * running_SV[:, -1:]).sum(dim=-1)
    return torch.where(ids == mask_id, drawn_S, ids).tolist()


def _ranked(completion: Completion) -> list[int]:
    """Return the steps that commit text or precede one that does, the highest mean entropy first."""
    ends = (
        {int(completion.token_ids[completion.num_tokens - 1])} if completion.finish_reason is FinishReason.EOS else {}
    )
    steps = completion.step_map.tolist()
    last = max((step for step, token in zip(steps, completion.token_ids, strict=True) if token not in ends), default=-1)
    means = [np.mean(completion.commit_entropy[completion.step_map == step]) for step in range(last + 1)]
    return sorted(range(last + 1), key=lambda step: -means[step])


@pytest.mark.parametrize("setting", SAMPLED)
@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_the_greedy_completions_of_the_states(
    engine: str, setting: str, bidirectional: Transformer
) -> None:
    requests = _asking(SamplingParams(**SAMPLED[setting]))
    completions = Sampler(bidirectional, 0, ENGINES[engine]).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        _check(bidirectional, request, completion)
    if setting == "by steps":
        assert any(len(completion.step_map) < 12 for completion in completions), "none ends before the last block"


def test_a_compiled_policy_sees_one_width(bidirectional: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the predicted slots, whatever the block: each width is compiled separately."""
    widths = []

    def forward(*arguments: Any, **others: Any) -> torch.Tensor:
        widths.append(arguments[2].shape[1])
        return bidirectional(*arguments, **others)

    monkeypatch.setattr("rollout.sampler._compiled", lambda _: forward)
    requests = _asking(SamplingParams(**BASE | {"stop_ids": ()}))
    completions = Sampler(bidirectional, 0, EngineConfig(num_slots=3, compile=True)).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        _check(bidirectional, request, completion)
    assert set(widths) == {12}


def _check(policy: Transformer, request: Request, completion: Completion) -> None:
    answers = completion.step_answers
    assert answers is not None
    assert answers.steps.tolist() == _ranked(completion)[: request.num_step_answers]
    ends = request.params.stop_ids
    assert ends is not None
    for step, tokens, num_tokens, ended in zip(
        answers.steps, answers.token_ids, answers.num_tokens, answers.ended, strict=True
    ):
        expected = _expected(policy, request, completion, int(step))
        assert tokens.tolist() == expected
        stops = [slot for slot, token in enumerate(expected) if token in ends]
        assert (int(num_tokens), bool(ended)) == ((stops[0] + 1, True) if stops else (len(expected), False))


@pytest.mark.parametrize("setting", [*SAMPLED, "greedy"])
@pytest.mark.parametrize("engine", ENGINES)
def test_sampled_answers_are_what_the_steps_drew(engine: str, setting: str, bidirectional: Transformer) -> None:
    """In every masked slot of the canvas; every second request asks for them, and the others for greedy ones."""
    params = SamplingParams(**SAMPLED.get(setting, BASE | {"temperature": 0.0}))
    requests = [replace(one, samples_step_answers=index % 2 == 0) for index, one in enumerate(_asking(params, 12))]
    completions = Sampler(bidirectional, 0, ENGINES[engine]).generate(requests)
    num_others = 0
    for request, completion in zip(requests, completions, strict=True):
        if not request.samples_step_answers:
            _check(bidirectional, request, completion)
            continue
        answers = completion.step_answers
        assert answers is not None
        assert sorted(answers.steps) == sorted(_ranked(completion)), "every step has an answer"
        for step, tokens in zip(answers.steps.tolist(), answers.token_ids, strict=True):
            assert tokens.tolist() == _sampled(bidirectional, request, completion, step)
            is_committed = completion.step_map == step
            assert tokens[: len(is_committed)][is_committed].tolist() == completion.token_ids[is_committed].tolist()
            num_others += int(tokens.tolist() != _expected(bidirectional, request, completion, step))
    assert (num_others == 0) is (setting == "greedy")


@pytest.mark.parametrize("engine", ["default", "static, three steps a check"])
def test_completions_are_those_without_answers(engine: str, bidirectional: Transformer) -> None:
    """Also where some requests of a batch ask for answers and others do not, and where blocks differ in length."""
    params = [SamplingParams(**BASE | {"block_length": length}) for length in (4, 12)]
    plain = [
        replace(one, params=params[index // 2 % 2])
        for index, one in enumerate(ragged_requests(params[0], (*LENGTHS, 3)))
    ]
    asking = [
        replace(one, num_step_answers=index % 2 * 3, samples_step_answers=index % 4 == 1)
        for index, one in enumerate(plain)
    ]
    theirs = Sampler(bidirectional, 0, ENGINES[engine]).generate(plain)
    batch = Sampler(bidirectional, 0, ENGINES[engine]).open(asking)
    ours: dict[int, Completion] = {}
    while len(ours) < len(asking):
        ours |= dict(batch.step())
    for index, completion in enumerate(theirs):
        assert (ours[index].step_answers is not None) == bool(index % 2)
        assert ours[index].token_ids.tolist() == completion.token_ids.tolist()
        assert ours[index].step_map.tolist() == completion.step_map.tolist()
        np.testing.assert_allclose(ours[index].commit_logp, completion.commit_logp, atol=1e-5)
        assert completion.step_answers is None
    assert batch._step_answers._states == [], "answers are kept that nobody asked for"


def test_a_cancelled_row_leaves_no_answers(bidirectional: Transformer) -> None:
    batch = Sampler(bidirectional, 0).open(_asking(SamplingParams(**BASE)))
    batch.step()
    for index in range(len(LENGTHS)):
        batch.cancel(index)
    assert batch._step_answers._states == []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # The second step commits ends alone, and the fourth one a token after the end of the text.
        ((5, 39, 39, 39, 39, 6, 39, 39), [2, 0, 1]),
        ((5, 39, 39, 39, 39, 39, 39, 39), [0]),
        ((39, 39, 39, 39, 39, 39, 39, 39), []),
    ],
)
def test_steps_that_only_commit_ends_after_the_text_are_left_out(tokens: tuple[int, ...], expected: list[int]) -> None:
    zeros = np.zeros(8, dtype=np.float32)
    completion = Completion(
        token_ids=np.array(tokens, dtype=np.int32),
        num_tokens=tokens.index(39) + 1,
        step_map=np.array([0, 0, 1, 1, 2, 2, 3, 3], dtype=np.int32),
        commit_logp=zeros,
        commit_logp_raw=zeros,
        commit_entropy=np.array([3, 1, 0, 1, 3, 4, 9, 9], dtype=np.float32),
        commit_law_entropy=zeros,
        fallback=zeros > 0,
        num_forwards=4,
        exact=True,
        logp_exact=True,
        finish_reason=FinishReason.EOS,
        policy_version=0,
    )
    assert steps_of_highest_entropy(completion, 8) == expected


@pytest.mark.parametrize(
    ("changes", "error"), [({"cache": "prefix"}, "cache prefix a part"), ({"cache": "dual"}, "cache dual a part")]
)
def test_caches_are_refused(changes: dict[str, Any], error: str, bidirectional: Transformer) -> None:
    with pytest.raises(ValueError, match=error):
        Sampler(bidirectional, 0).generate(_asking(SamplingParams(**BASE | changes)))


def test_block_causal_policies_are_refused(config: TransformerConfig) -> None:
    with pytest.raises(ValueError, match="block-causal one predicts one block"):
        Sampler(sharp_policy(config, 3.0), 0).generate(_asking(SamplingParams(**BASE)))
