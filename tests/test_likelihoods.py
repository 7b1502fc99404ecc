"""The learner's likelihoods equal the log-probabilities that an exact sampler recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.messages import ScoredWorkUnit, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.spec import sampler_facts
from actors.training.collate import collate
from actors.training.dynamic_sampling import EVERY_GROUP
from learner.batch import GroupedBatch
from learner.estimators import InnerUpdate, TrajectoryConfig, make_terms, token_logps
from learner.model.networks import make_model
from learner.model.transformer import Transformer
from rewards import Grade, Message, Problem
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler

SCHEDULES: dict[str, dict[str, object]] = {
    "quota": {"num_denoise_steps": 6},
    "threshold": {"num_denoise_steps": 12, "threshold": 0.2},
    "blocks of one": {"block_length": 1, "num_denoise_steps": 12},
    "forbidden ids": {"num_denoise_steps": 6, "forbidden_ids": tuple(range(5, 25))},
    "drawn first": {"num_denoise_steps": 6, "drawing": "sample_then_select"},
}


def _sampled(policy: Transformer, **settings: object) -> tuple[GroupedBatch, SamplingParams]:
    params = SamplingParams.model_validate({"gen_length": 12, "block_length": 4, "temperature": 0.8} | settings)
    prompts = [(3, 4, 5), (6, 7, 8, 9)]
    requests = [Request(prompt_ids=prompts[i // 4], params=params, seed=i) for i in range(8)]
    completions = Sampler(policy, 0).generate(requests)
    problem = Problem(problem_id="p", messages=(Message(role="user", content="?"),), answer="", reference_completion="")
    work_unit = WorkUnit(
        key=WorkUnitKey(round=0, index=0),
        problems=(problem,) * 8,
        group_ids=tuple(i // 4 for i in range(8)),
        requests=tuple(requests),
    )
    grades = tuple(Grade(reward=i / 8, parts={"all": i / 8}, correct=False) for i in range(8))
    summary = WorkUnitSummary.of(completions, grades, texts=[""] * len(completions), costs={})
    scored = ScoredWorkUnit(work_unit=work_unit, completions=tuple(completions), summary=summary)
    num_slots = params.max_slots(is_block_causal=policy.config.is_block_causal)
    return GroupedBatch.of(collate([scored], num_slots, policy.config.stop_ids, EVERY_GROUP)), params


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_trajectory_estimator_gives_the_recorded_log_probs(policy: Transformer, name: str) -> None:
    """Some completions end early. Tokens after an end of text in its block stay as context; slots never denoised stay
    masked."""
    with torch.no_grad():
        policy.head.weight[policy.config.eos_token_id] += 0.3
    batch, params = _sampled(policy, **SCHEDULES[name])
    config = TrajectoryConfig(steps_per_segment=1, law="sampler")
    facts = sampler_facts(params)
    terms = make_terms(batch, policy.config, config.corrupt(batch, InnerUpdate(0, 1), facts))
    assert facts.has_reproducible_logps
    assert terms.num_terms == int(batch.completion_lengths.sum())
    with torch.no_grad():
        logps = token_logps(policy, terms.views, terms.distribution)
    np.testing.assert_allclose(logps, batch.commit_logp[terms.rows, terms.slots], atol=1e-5)


BLOCK_CAUSAL: dict[str, dict[str, object]] = {
    "quota": {"steps_per_block": 2},
    "threshold": {"steps_per_block": 4, "threshold": 0.2},
    "blocks that do not fit": {"gen_length": 11, "steps_per_block": 3},
    "other blocks than its own": {"block_length": 6, "steps_per_block": 6},
    "blocks of one": {"block_length": 1, "steps_per_block": 1},
    "forbidden ids": {"steps_per_block": 2, "forbidden_ids": tuple(range(5, 25))},
    "no stop": {"steps_per_block": 2, "stop_ids": ()},
}


@pytest.mark.filterwarnings("ignore:block_length .* is not the 4 slots")
@pytest.mark.parametrize("predicts_next", [False, True])
@pytest.mark.parametrize("name", BLOCK_CAUSAL)
def test_one_row_replays_a_block_causal_completions_log_probs(
    policy: Transformer, name: str, predicts_next: bool
) -> None:
    """Sampled with a KV cache, replayed behind clean canvases: one row holds all steps of a completion."""
    changes = {"family": "sdar", "block_length": 4, "predicts_next": predicts_next}
    causal = make_model(policy.config.model_copy(update=changes))
    causal.load_state_dict(policy.state_dict())
    with torch.no_grad():
        causal.head.weight[policy.config.eos_token_id] += 0.3
    batch, params = _sampled(causal, **BLOCK_CAUSAL[name])
    config, facts = TrajectoryConfig(steps_per_segment=1, law="sampler"), sampler_facts(params, is_block_causal=True)
    corruption = config.corrupt(batch, InnerUpdate(0, 1), facts)
    terms = make_terms(batch, causal.config, corruption, params.block_length)
    assert facts.has_reproducible_logps
    assert terms.num_terms == int(batch.completion_lengths.sum())
    with torch.no_grad():
        logps = token_logps(causal, terms.views, terms.distribution)
    np.testing.assert_allclose(logps, batch.commit_logp[terms.rows, terms.slots], atol=2e-5)
    assert len(terms.views.ids) <= 8


def test_approximate_samplers_are_marked_as_not_reproducible() -> None:
    for settings in ({"cache": "dual"}, {"top_p": 0.9}, {"cfg_scale": 1.0}):
        assert not sampler_facts(SamplingParams.model_validate(settings)).has_reproducible_logps
    drawn_first = sampler_facts(SamplingParams.model_validate({"drawing": "sample_then_select"}))
    assert drawn_first.has_reproducible_logps
    assert not drawn_first.has_exact_logps
