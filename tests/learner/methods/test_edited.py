"""Token editing: every write of a completion is scored in the state before its step, as sampled."""

import pytest
import torch

from actors.messages import ScoredWorkUnit, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.spec import sampler_facts
from actors.training.collate import collate
from actors.training.dynamic_sampling import EVERY_GROUP
from learner.algorithms import with_algorithm
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts, TrajectoryConfig, make_terms, token_logps
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from learner.parallel.micro_batches import make_micro_batches
from learner.parallel.sharding import ShardedPolicy
from rewards import Grade
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler

BLOCK, MASK = 4, 38
FIRST = InnerUpdate(0, 1)
ROUND = {"num_rounds": 1, "groups_per_round": 2, "group_size": 4, "lr": 1e-3, "inner_updates": 1}
PARAMS = SamplingParams(gen_length=11, block_length=BLOCK, threshold=0.3, editing_threshold=0.0, temperature=0.8)
FACTS = sampler_facts(PARAMS, is_block_causal=True)
EXACT = TrajectoryConfig(steps_per_segment=1, law="sampler")


@pytest.fixture
def policy(config: TransformerConfig) -> Transformer:
    model = make_model(config.model_copy(update={"family": "sdar", "block_length": BLOCK, "qk_norm": True}))
    init_weights(model, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(8.0)
    return model


@pytest.fixture
def sampled(policy: Transformer) -> tuple[list[Request], list[Completion]]:
    prompts = [(1, 2, 3, 4, 5, 6), (7, 8, 9)]
    requests = [Request(prompt_ids=prompts[i // 4], params=PARAMS, seed=i) for i in range(8)]
    return requests, Sampler(policy, 3).generate(requests)


@pytest.fixture
def batch(sampled: tuple[list[Request], list[Completion]], config: TransformerConfig) -> RolloutBatch:
    requests, completions = sampled
    groups = tuple(i // 4 for i in range(8))
    work_unit = WorkUnit(key=WorkUnitKey(round=0, index=0), problems=(), group_ids=groups, requests=tuple(requests))
    grades = [Grade(reward=(i % 3) / 2, parts={}, correct=i % 3 == 2) for i in range(8)]
    summary = WorkUnitSummary.of(completions, grades, [""] * 8, {})
    scored = ScoredWorkUnit(work_unit=work_unit, completions=tuple(completions), summary=summary)
    found = collate([scored], PARAMS.max_slots(is_block_causal=True), config.stop_ids, EVERY_GROUP)
    assert found is not None
    return found


def test_writes_are_scored_as_they_were_drawn(
    policy: Transformer, batch: RolloutBatch, sampled: tuple[list[Request], list[Completion]]
) -> None:
    grouped = GroupedBatch.of(batch)
    terms = make_terms(grouped, policy.config, EXACT.corrupt(grouped, FIRST, FACTS), BLOCK)
    expected = []
    for row, completion in enumerate(sampled[1]):
        writes = completion.writes
        assert writes is not None
        columns = zip(writes.steps.tolist(), writes.slots.tolist(), writes.logp.tolist(), strict=True)
        expected += [(row, step, slot, logp) for step, slot, logp in columns if slot < completion.num_tokens]
    assert len(expected) > int(batch.completion_lengths.sum()) + 10, "tokens are written more than once"
    assert terms.recorded is not None
    found = zip(*(column.tolist() for column in (terms.rows, terms.parts, terms.slots, terms.recorded)), strict=True)
    assert sorted(found) == [(row, step, slot, pytest.approx(logp)) for row, step, slot, logp in sorted(expected)]
    assert len(terms.views.ids) == 8, "all states of a completion stand in one row"
    with torch.no_grad():
        logps = token_logps(policy, terms.views, terms.distribution)
        assert logps.tolist() == pytest.approx(terms.recorded.tolist(), abs=1e-4)
        # Each micro-batch carries its part of the record.
        micros = make_micro_batches(terms, terms.rows, 3 * terms.views.ids.shape[1]).terms
        assert len(micros) > 1
        for micro in micros:
            assert micro.recorded is not None
            again = token_logps(policy, micro.views, micro.distribution)
            assert again.tolist() == pytest.approx(micro.recorded.tolist(), abs=1e-4)


def test_a_state_shows_the_last_written_tokens(policy: Transformer, batch: RolloutBatch) -> None:
    grouped = GroupedBatch.of(batch)
    corruption = EXACT.corrupt(grouped, FIRST, FACTS)
    assert corruption.shown is not None
    assert corruption.targets is not None
    assert batch.writes is not None
    num_edits = 0
    for canvas, (row, step) in enumerate(zip(corruption.rows.tolist(), corruption.parts.tolist(), strict=True)):
        shown: dict[int, int] = {}
        for at, slot, token in batch.writes[row].tolist():
            if at == step and slot < batch.completion_lengths[row]:
                assert corruption.scored[canvas, slot]
                assert corruption.targets[canvas, slot] == token
                num_edits += slot in shown
            if 0 <= at < step:
                shown[slot] = token
        for slot in range(batch.num_slots):
            assert bool(corruption.masked[canvas, slot]) == (slot not in shown)
            if slot in shown:
                assert corruption.shown[canvas, slot] == shown[slot]
    assert num_edits > 10


def test_sampled_steps_have_importance_weights(batch: RolloutBatch) -> None:
    grouped = GroupedBatch.of(batch)
    every = EXACT.corrupt(grouped, FIRST, FACTS)
    some = TrajectoryConfig(steps_per_segment=1, law="sampler", num_sampled=2).corrupt(grouped, FIRST, FACTS)
    assert some.rows.bincount().tolist() == [2] * 8
    assert some.importance is not None
    per_row = torch.zeros(8).index_add_(0, some.rows, some.importance[:, 0])
    assert per_row.tolist() == pytest.approx(every.rows.bincount().tolist())


@pytest.mark.parametrize(
    "method",
    [{"algorithm": "cj-grpo"}, {"algorithm": "tracerl", "estimator": EXACT.model_dump()}, {"algorithm": "diffu-grpo"}],
    ids=["cj-grpo", "tracerl", "diffu-grpo"],
)
def test_a_round_with_edits_trains(policy: Transformer, batch: RolloutBatch, method: dict[str, object]) -> None:
    config = LearnerConfig(**with_algorithm(ROUND | method))
    learner = Learner(ShardedPolicy(policy, None), config, FACTS)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    metrics = learner.update(batch, 0)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps_per_segment": 2}, "steps_per_segment is 2"),
        ({"num_segments": 4, "steps_per_segment": None}, "steps_per_segment is null"),
        ({"only": "fallback"}, "only is fallback"),
        ({"slots": "denoised"}, "slots is denoised"),
        ({"num_sampled": 2, "proposal": "entropy"}, "proposal is entropy"),
        ({"num_shown_steps": 1}, "num_shown_steps is 1"),
        ({"p_mask_prompt": 0.25}, "p_mask_prompt is 0.25"),
    ],
)
def test_options_that_single_writes_lack_are_refused(changes: dict[str, object], said: str) -> None:
    refusal = TrajectoryConfig(**{"steps_per_segment": 1} | changes).incompatibility(FACTS)
    assert refusal is not None
    assert refusal.startswith(f"estimator.{said}, and rollout.sampling.editing_threshold")
    assert EXACT.incompatibility(FACTS) is None
    assert (
        TrajectoryConfig(**{"steps_per_segment": 1} | changes).incompatibility(SamplerFacts(has_fallback=True)) is None
    )
