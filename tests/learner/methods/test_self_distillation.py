"""Distillation from the policy itself, which sees some of the completion's later blocks (d-OPSD)."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from learner.advantages import Filters, Rewards
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts, StepStatesConfig, make_terms, shown_future, token_logps
from learner.learner import Learner
from learner.model import scoring
from learner.model.lora_config import LoraConfig
from learner.model.targets import Targets, TeacherStates
from learner.model.transformer import Transformer
from learner.objectives import DistillationConfig
from learner.parallel.self_teacher import SelfTeacher, teacher_views
from learner.parallel.sharding import ShardedPolicy
from tests.learner.batches import batch_of

SAMPLER = SamplerFacts(block_length=4)
OBJECTIVE = DistillationConfig(reverse_kl=1.0, top_k=20, renormalize_top_k=True, pointwise_clip=0.05, future_share=0.25)
SLOTS = 16


def _batch(*lengths: int) -> GroupedBatch:
    """Return completions of four blocks of four slots, two a step, all denoised."""
    num_rows = len(lengths)
    steps = torch.tensor([0, 1, 0, 1]).repeat(4) + 2 * (torch.arange(SLOTS) // 4)
    batch = batch_of(
        prompts=torch.arange(2 * num_rows).view(num_rows, 2),
        completions=torch.arange(num_rows * SLOTS).view(num_rows, SLOTS) % 37,
        lengths=torch.tensor(lengths),
        steps=steps.expand(num_rows, -1),
        rewards=torch.zeros(num_rows),
    )
    return GroupedBatch.of(batch)


def _states(batch: GroupedBatch, count: int) -> list[list[tuple[int, int]]]:
    """Return the row and step of each canvas, by update."""
    found = []
    for index in range(count):
        corruption = StepStatesConfig().corrupt(batch, InnerUpdate(index, count), SAMPLER)
        assert corruption.parts is not None
        found.append(list(zip(corruption.rows.tolist(), corruption.parts.tolist(), strict=True)))
    return found


def test_updates_share_the_states_of_all_blocks_but_the_last() -> None:
    """In order. A text of ten tokens ends in step 5; one of nine in step 4, and what step 5 commits is fill."""
    batch = _batch(16, 10, 9)
    assert _states(batch, 1) == [[(row, step) for row, last in ((0, 5), (1, 5), (2, 4)) for step in range(last + 1)]]
    thirds = _states(batch, 3)
    assert [step for row, step in thirds[0] + thirds[1] + thirds[2] if row == 2] == [0, 1, 2, 3, 4]
    assert [[step for row, step in third if row == 0] for third in thirds] == [[0, 1], [2, 3], [4, 5]]
    corruption = StepStatesConfig().corrupt(batch, InnerUpdate(0, 1), SAMPLER)
    block_L = torch.arange(SLOTS) // 4
    for (row, step), masked, scored in zip(_states(batch, 1)[0], corruption.masked, corruption.scored, strict=True):
        assert torch.equal(masked, batch.step_map[row] >= step)
        assert torch.equal(scored, masked & (block_L == step // 2))


def test_a_row_that_only_pads_a_shard_has_no_state() -> None:
    assert _states(_batch(16).empty_row(), 1) == [[]]


def test_a_share_of_the_later_blocks_is_shown() -> None:
    batch = _batch(16, 16).select(torch.tensor([0, 0, 0, 1, 0]))
    steps_B = torch.tensor([0, 1, 4, 4, 6])
    shown = shown_future(batch, steps_B, 0.25, SAMPLER)
    assert shown.sum(dim=1).tolist() == [3, 3, 1, 1, 0]
    assert not (shown & (torch.arange(SLOTS) // 4 <= steps_B[:, None] // 2)).any()
    assert not torch.equal(shown[0], shown[1]), "each state has a draw of its own"
    alone = shown_future(batch.select(slice(1, 2)), steps_B[1:2], 0.25, SAMPLER)
    assert torch.equal(alone[0], shown[1]), "a draw does not depend on the batch"
    every = shown_future(batch, steps_B, 1.0, SAMPLER)
    assert every.sum(dim=1).tolist() == [12, 12, 4, 4, 0]
    undenoised = replace(batch, step_map=batch.step_map.masked_fill(torch.arange(SLOTS) >= 12, -1))
    assert shown_future(undenoised, steps_B, 1.0, SAMPLER).sum(dim=1).tolist() == [8, 8, 0, 0, 0]


def test_nothing_is_shown_of_a_block_that_begins_with_the_end_of_text() -> None:
    shown = shown_future(_batch(5, 6), torch.tensor([0, 0]), 0.25, SAMPLER)
    assert shown.sum(dim=1).tolist() == [0, 3]


def test_the_teacher_runs_the_policys_canvases_with_the_future_filled_in(policy: Transformer) -> None:
    batch = _batch(16, 10)
    terms = make_terms(
        batch, policy.config, StepStatesConfig().corrupt(batch, InnerUpdate(0, 1), SAMPLER), SAMPLER.block_length
    )
    views, counts_C = teacher_views(terms, batch, policy.config, OBJECTIVE, SAMPLER)
    assert counts_C.tolist() == [2] * 12
    assert torch.equal(views.slots[views.scored] % 18, terms.views.slots[terms.views.scored] % 18)
    of_term = terms.views.ids[terms.views.slots[terms.views.scored] // 18]
    theirs = views.ids[views.slots[views.scored] // 18]
    is_filled = of_term != theirs
    assert torch.equal(is_filled[:, 2:], shown_future(batch.select(terms.rows), terms.parts, 0.25, SAMPLER))
    assert set(of_term[is_filled].tolist()) == {policy.config.mask_token_id}
    whole = torch.cat((batch.prompt_ids, batch.completion_ids), dim=1)[terms.rows]
    assert torch.equal(theirs[is_filled], whole[is_filled])


def test_with_an_adapter_the_teacher_is_the_policy_without_it(policy: Transformer, rollouts: RolloutBatch) -> None:
    adapted = ShardedPolicy(copy.deepcopy(policy), None, lora=LoraConfig(rank=4, alpha=8))
    with torch.no_grad():
        for parameter in adapted.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    batch = GroupedBatch.of(rollouts)
    terms = make_terms(batch, policy.config, StepStatesConfig().corrupt(batch, InnerUpdate(0, 1), SAMPLER))
    ours, theirs, changed = (
        SelfTeacher(adapted, reference, OBJECTIVE, SAMPLER).states(terms, batch)
        for reference in (None, ShardedPolicy(policy, None), adapted)
    )
    torch.testing.assert_close(ours.head_input, theirs.head_input)
    assert not torch.allclose(ours.head_input, changed.head_input, atol=1e-2)
    assert not ours.head_input.requires_grad


def test_the_first_correct_completion_of_each_group_is_trained_on() -> None:
    correct = torch.tensor([False, True, True, False, False, True, False, True])
    rewards = Rewards(
        total=torch.arange(8.0), parts=torch.zeros(8, 1), correct=correct, groups=torch.tensor([3, 3, 3, 1, 1, 7, 7, 7])
    )
    truncated, speeds = torch.zeros(8, dtype=torch.bool), torch.ones(8)
    kept = Filters(first_correct=True).keeps(rewards, truncated, speeds)
    assert kept.nonzero()[:, 0].tolist() == [1, 5]
    assert not Filters(first_correct=True).keeps(replace(rewards, correct=truncated), truncated, speeds).any()


@pytest.mark.parametrize("reverse_kl", [0.0, 0.35, 1.0])
@pytest.mark.parametrize(("top_k", "renormalizes"), [(3, True), (3, False), (6, True), (None, False)])
@pytest.mark.parametrize("excludes", [False, True])
def test_clipped_and_renormalized_divergences_equal_plain_loops(
    reverse_kl: float, top_k: int | None, renormalizes: bool, excludes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain loops over the chosen slots and tokens, in float64. Chunks hold two slots."""
    monkeypatch.setattr(scoring, "_MAX_LOGITS_CPU", 2 * 7)
    generator = torch.Generator().manual_seed(3)
    x_MD, weight_VD = torch.randn(4, 5, generator=generator), torch.randn(7, 5, generator=generator)
    head_input, head = torch.randn(5, 6, generator=generator), torch.randn(7, 6, generator=generator)
    slot_N, grad_N, chosen = torch.tensor([0, 1, 1, 2, 3]), torch.randn(5, generator=generator), [4, 0, 2]
    clip = 0.1
    states = TeacherStates(
        head_input=head_input,
        weight=head,
        reverse_kl=reverse_kl,
        top_k=top_k,
        renormalizes=renormalizes,
        pointwise_clip=clip,
        chosen=torch.tensor(chosen),
    )
    targets = Targets(slot=slot_N, token=slot_N, temperature=0.8, mask_id=2, excludes_mask_id=excludes, teacher=states)
    leaves = [x_MD.requires_grad_(), weight_VD.requires_grad_()]
    found = scoring.score_targets(x_MD, weight_VD, targets)
    ours = torch.autograd.grad((found * grad_N).sum(), leaves)

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    values, num_clipped = [torch.zeros((), dtype=torch.float64)] * 5, 0
    for term in chosen:
        raw = [(wide[0][slot_N[term]] @ wide[1].T) / 0.8, (head_input[term].double() @ head.T.double()) / 0.8]
        kept = [token for token in range(7) if not (excludes and token == 2)]
        best = sorted(kept, key=lambda token: -float(raw[1][token]))[:top_k]
        among = best if renormalizes else kept
        new, teacher = (dict(zip(among, one[among].log_softmax(0), strict=True)) for one in raw)
        for token in best:
            forward = teacher[token].exp() * (teacher[token] - new[token])
            reverse = new[token].exp() * (new[token] - teacher[token])
            summand = (1 - reverse_kl) * forward + reverse_kl * reverse
            num_clipped += int(summand.detach() > clip)
            values[term] = values[term] + summand.clamp(max=clip)
    assert num_clipped > 0
    expected = torch.stack(values)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    derivatives = torch.autograd.grad((expected * grad_N).sum(), wide)
    for one, other in zip(ours, derivatives, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


def test_chosen_terms_survive_another_order_of_the_slots(policy: Transformer, rollouts: RolloutBatch) -> None:
    batch = GroupedBatch.of(rollouts)
    terms = make_terms(batch, policy.config, StepStatesConfig().corrupt(batch, InnerUpdate(0, 1), SAMPLER))
    teacher = SelfTeacher(ShardedPolicy(policy, None), ShardedPolicy(policy, None), OBJECTIVE, SAMPLER)
    states = teacher.states(terms, batch)
    # The divergence from other hidden states, so that it is not zero.
    states = replace(states, head_input=states.head_input.flip(1))
    found = token_logps(policy, terms.views, terms.distribution, teacher=states)
    order = torch.arange(terms.num_terms).flip(0)
    turned = replace(terms.views, scored=terms.views.scored[order], targets=terms.views.targets[order])
    assert states.chosen is not None
    other = replace(states, head_input=states.head_input[order], chosen=terms.num_terms - 1 - states.chosen)
    torch.testing.assert_close(token_logps(policy, turned, terms.distribution, teacher=other)[order], found)
    assert set(found.nonzero()[:, 0].tolist()) == set(states.chosen.tolist())
    assert 0 < len(states.chosen) < terms.num_terms


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"objective": {"teacher": "some"}}, "future_share makes the policy its own teacher, and teacher is some"),
        ({"objective": {"top_k": None}}, "renormalize_top_k needs top_k"),
        ({"objective": {"future_share": None}}, "objective.future_share and estimator step_states need each other"),
        ({"estimator": {"name": "block_states"}}, "objective.future_share and estimator step_states need each other"),
        ({"max_staleness": 1}, "max_staleness is 1"),
    ],
)
def test_contradictory_settings_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        LearnerConfig.model_validate({"algorithm": "d-opsd", "num_rounds": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_blocks": 1}, "rollout.sampling has one block: take a block_length of at most half of gen_length"),
        ({"is_block_causal": True}, "a block-causal policy looks at earlier ones alone"),
        ({"edits": True}, "leave editing_threshold out"),
        ({"num_blocks": 3, "max_denoise_steps": 3}, "at most 2 are scored: .* take learner.inner_updates=2"),
    ],
)
def test_samplers_without_a_later_block_are_refused(changes: dict[str, object], reason: str) -> None:
    config = LearnerConfig.model_validate({"algorithm": "d-opsd", "num_rounds": 1})
    assert re.search(reason, str(config.incompatibility(replace(SAMPLER, **changes))))  # type: ignore[arg-type]
    assert config.incompatibility(SAMPLER) is None


def test_the_teacher_stays_the_policy_that_the_rounds_began_with(policy: Transformer, rollouts: RolloutBatch) -> None:
    """Until `reference_sync_rounds`."""
    config = LearnerConfig.model_validate(
        {"algorithm": "d-opsd", "num_rounds": 2, "inner_updates": 2, "reference_sync_rounds": 2, "lr": 1e-2}
    )
    start = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    learner = Learner(ShardedPolicy(policy, None), config, SAMPLER)
    first = learner.update(rollouts, 0)
    assert learner.reference is not None
    learner.sync_reference(0)
    assert all(torch.equal(tensor, start[name]) for name, tensor in learner.reference.full_weights().items())
    learner.sync_reference(1)
    assert not torch.equal(learner.reference.full_weights()["head.weight"], start["head.weight"])
    assert first["num_trained_completions"] == sum(bool(some.any()) for some in rollouts.correct.view(3, 4))
    assert "token_logp" not in first
