"""Token editing (LLaDA2.1) against the original code's generations and the reference (slow.py)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.model.checkpoint import load_policy
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.field_error import FieldError
from rollout.request import Completion, Request, SamplingOrder, SamplingParams, Writes
from rollout.sampler import Sampler
from tests.rollout.ragged import ragged_requests, sharp_policy
from tests.rollout.slow import Slow, sample

ENGINES = {
    "remembered": EngineConfig(),
    "whole": EngineConfig(block_cache=False),
    "static, two slots": EngineConfig(num_slots=2, static_shapes=True, steps_per_sync=3),
    "static, whole": EngineConfig(block_cache=False, static_shapes=True, steps_per_sync=3),
}
BASE: dict[str, Any] = {"gen_length": 11, "block_length": 4, "threshold": 0.3, "temperature": 1.0}
LENGTHS = (3, 9, 4, 1)
WITHOUT_EDITS = SamplingParams(gen_length=9, block_length=4, steps_per_block=2, temperature=1.0)


@pytest.fixture(scope="module")
def policy(config: TransformerConfig) -> Transformer:
    # Confident enough that tokens are committed early, and later replaced.
    return sharp_policy(config, 8.0)


def _requests(**changes: Any) -> list[Request]:
    return ragged_requests(SamplingParams(**BASE | changes), LENGTHS)


def _originals(directory: Path) -> list[tuple[dict[str, Any], list[Request]]]:
    """Return the settings of LLaDA2.1's loop, with the requests of each."""
    settings = json.loads((directory / "expected_generations.json").read_text())
    found = []
    for setting in (setting for setting in settings if setting.get("loop") == "llada2.1"):
        assert setting["num_to_transfer"] == 1
        params = SamplingParams(
            gen_length=setting["gen_length"],
            block_length=setting["block_length"],
            threshold=setting["threshold"],
            editing_threshold=setting["editing_threshold"],
            max_post_steps=setting["max_post_steps"],
            temperature=setting["temperature"],
            stop_ids=tuple(setting["stop_ids"]),
        )
        prompts = [tuple(prompt) for prompt in setting["prompt"]]
        found.append((setting, [Request(prompt_ids=prompt, params=params, seed=0) for prompt in prompts]))
    return found


def _check_original(completion: Completion, setting: dict[str, Any], row: int) -> None:
    assert completion.writes is not None
    events: list[list[list[int]]] = []
    for step, slot, token in zip(
        completion.writes.steps, completion.writes.slots, completion.writes.token_ids, strict=True
    ):
        events += [[] for _ in range(step + 1 - len(events))]
        events[step].append([int(slot), int(token)])
    # A forward without any write ends a block.
    assert events == [sorted(event) for event in setting["events"][row] if event]
    assert completion.token_ids.tolist() == setting["output"][row]
    assert completion.num_forwards == setting["num_denoise_forwards"][row]
    assert completion.exact


@pytest.mark.filterwarnings("ignore:block_length .* is not the 32 slots")
def test_generations_equal_the_original_codes(shared: Path) -> None:
    """Each request alone, and on each engine all requests of both settings in one batch."""
    directory = shared / "fixtures" / "llada2-tiny"
    policy, settings = load_policy(directory), _originals(directory)
    assert len(settings) == 2
    assert any(len(event) > 1 for setting, _ in settings for events in setting["events"] for event in events)
    for setting, requests in settings:
        for row, request in enumerate(requests):
            (alone,) = Sampler(policy, 0).generate([request])
            _check_original(alone, setting, row)
    for engine in ENGINES.values():
        mixed = iter(Sampler(policy, 0, engine).generate([request for _, some in settings for request in some]))
        for setting, requests in settings:
            for row in range(len(requests)):
                _check_original(next(mixed), setting, row)


def _check_equal(completion: Completion, slow: Slow, num_passes: int = 1) -> None:
    n, writes = len(completion.token_ids), completion.writes
    assert completion.token_ids.tolist() == slow.tokens[:n]
    assert completion.step_map.tolist() == slow.step_map[:n]
    assert completion.commit_logp == pytest.approx(slow.logp[:n], abs=2e-5)
    assert completion.commit_logp_raw == pytest.approx(slow.logp_raw[:n], abs=2e-5)
    assert completion.fallback.tolist() == slow.fallback[:n]
    assert writes is not None
    expected = [write for write in slow.writes if write[1] < n]
    assert [*zip(writes.steps, writes.slots, writes.token_ids, strict=True)] == [write[:3] for write in expected]
    assert writes.logp == pytest.approx([write[3] for write in expected], abs=2e-5)
    assert writes.logp_raw == pytest.approx([write[4] for write in expected], abs=2e-5)
    if n == len(slow.tokens):
        assert completion.num_forwards == (slow.num_steps + slow.num_idle) * num_passes


FITTING: dict[str, dict[str, Any]] = {
    "speed": {"editing_threshold": 0.0},
    "quality": {"editing_threshold": 0.3},
    "few steps after the last mask": {"editing_threshold": 0.0, "max_post_steps": 1},
    "greedy": {"editing_threshold": 0.2, "temperature": 0.0},
    "shares": {"editing_threshold": 0.2, "threshold": None, "steps_per_block": 2},
    "truncated": {"editing_threshold": 0.1, "top_k": 3, "top_p": 0.9},
    "guided": {"editing_threshold": 0.2, "cfg_scale": 0.5, "max_post_steps": 3},
    "whole canvases": {"editing_threshold": 0.2, "stop_ids": ()},
}


@pytest.mark.parametrize("changes", FITTING.values(), ids=FITTING)
def test_a_ragged_batch_equals_the_slow_sampler(policy: Transformer, changes: dict[str, Any]) -> None:
    """Batched with rows that do not edit, which must equal their completions alone."""
    requests, others = _requests(**changes), [replace(request, params=WITHOUT_EDITS) for request in _requests()[:2]]
    edited = [sample(policy, request) for request in requests]
    plain = [sample(policy, request) for request in others]
    for engine in ENGINES.values():
        completions = Sampler(policy, 7, engine).generate([*others, *requests])
        for completion, slow in zip(completions[2:], edited, strict=True):
            _check_equal(completion, slow, num_passes=2 if changes.get("cfg_scale") else 1)
        for completion, slow in zip(completions, plain, strict=False):
            assert completion.writes is None
            assert completion.token_ids.tolist() == slow.tokens[: len(completion.token_ids)]


def test_the_slow_sampler_edits_tokens(policy: Transformer) -> None:
    """Guards the other tests: some tokens are written twice, and blocks end in both ways."""
    loose = [sample(policy, request) for request in _requests(editing_threshold=0.0, stop_ids=())]
    assert sum(len(slow.writes) - len(slow.tokens) for slow in loose) > 20
    assert any(slow.num_idle for slow in loose)
    strict = [sample(policy, request) for request in _requests(editing_threshold=0.0, stop_ids=(), max_post_steps=1)]
    assert sum(slow.num_steps for slow in strict) < sum(slow.num_steps for slow in loose)


def test_fixed_tokens_are_never_edited(policy: Transformer) -> None:
    request = _requests(editing_threshold=0.0, temperature=0.0, stop_ids=())[1]
    free = sample(policy, request)
    # The first token it would write there: from then on the canvases are equal, but one must not edit that slot.
    first = next(write for write in free.writes if any(w[1] == write[1] and w is not write for w in free.writes))
    given = replace(request, fixed_tokens={first[1]: first[2]})
    for engine in ENGINES.values():
        one, two, again = Sampler(policy, 0, engine).generate([request, given, request])
        _check_equal(one, free)
        _check_equal(two, sample(policy, given))
        _check_equal(again, free)
        assert two.token_ids[first[1]] == first[2]


def test_a_token_is_the_last_one_written_to_its_slot(policy: Transformer) -> None:
    for completion in Sampler(policy, 0).generate(_requests(editing_threshold=0.0)):
        writes = completion.writes
        assert writes is not None
        tokens, logp = np.full(len(completion.token_ids), -1), np.zeros(len(completion.token_ids), dtype=np.float32)
        tokens[writes.slots], logp[writes.slots] = writes.token_ids, writes.logp
        assert tokens.tolist() == completion.token_ids.tolist()
        assert logp.tolist() == completion.commit_logp.tolist()
        assert sorted(set(writes.steps.tolist())) == [*range(completion.step_map.max() + 1)]


def test_finished_and_cancelled_rows_leave_no_edit_log(policy: Transformer) -> None:
    requests = _requests(editing_threshold=0.0)
    batch = Sampler(policy, 0, EngineConfig(num_slots=3)).open(requests)
    batch.step()
    batch.cancel(0)
    done: dict[int, Completion] = {}
    while batch.num_running or batch.num_waiting:
        done |= batch.step()
    for index, request in enumerate(requests[1:], start=1):
        _check_equal(done[index], sample(policy, request))
    assert not batch._edit_log._steps


def test_a_resumed_completion_equals_the_uninterrupted_one(policy: Transformer) -> None:
    for request in _requests(editing_threshold=0.0, stop_ids=()):
        (whole,) = Sampler(policy, 0).generate([request])
        batch = Sampler(policy, 0).open([request])
        while not (batch.num_committed() or {0: 0})[0]:
            batch.step()
        committed = batch.progress([0])[0].committed
        (rest,) = Sampler(policy, 0).generate([replace(request, committed=committed)])
        assert rest.token_ids.tolist() == whole.token_ids.tolist()
        assert rest.step_map.tolist() == whole.step_map.tolist()
        assert rest.commit_logp == pytest.approx(whole.commit_logp, abs=2e-5)


def test_no_writes_have_length_zero() -> None:
    assert len(Writes.none()) == 0


def test_a_bidirectional_policy_does_not_edit(config: TransformerConfig) -> None:
    model = Transformer(config)
    init_weights(model, seed=0)
    params = SamplingParams(gen_length=4, block_length=4, threshold=0.5, editing_threshold=0.5)
    with pytest.raises(ValueError, match="editing_threshold is for block-causal policies, and this"):
        Sampler(model, 0).generate([Request(prompt_ids=(1,), params=params, seed=0)])


def test_editing_needs_select_then_sample() -> None:
    with pytest.raises(ValueError, match="needs drawing select_then_sample") as caught:
        SamplingParams(threshold=0.5, editing_threshold=0.5, drawing=SamplingOrder.SAMPLE_THEN_SELECT)
    assert isinstance(caught.value, FieldError) or "editing_threshold" in str(caught.value)
