"""Distillation from a teacher, against the authors' code and plain loops.

The golden numbers are from github.com/divelab/OPDLM at 3bb8bf6: `collect_training_data` and `forward_process` of
train/rl_sdar.py, with the options of configs/rl_bd3lm.yaml and `one_state_per_block`, which its launchers set. They
were run in float64 on formulas instead of models. The student's logits depend on row, slot, the number of masked slots
in the block, and one parameter. The teacher's depend on the sum and the number of the tokens it sees. The authors' code
received our random draws.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import learner.learner
import learner.parallel.teacher
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import BlockStatesConfig, InnerUpdate, SamplerFacts, Views, make_terms
from learner.learner import Learner
from learner.model import scoring
from learner.model.checkpoint import save_checkpoint
from learner.model.lora_config import LoraConfig
from learner.model.networks import make_model
from learner.model.targets import Targets, TeacherStates
from learner.model.transformer import Transformer
from learner.objectives import DistillationConfig
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.teacher import Teacher
from tests.learner.batches import batch_of
from tests.learner.methods.test_published_losses import COMPLETIONS, END, MASK, PROMPT, STEPS, _Steps

VOCABULARY = 40
SAMPLER = SamplerFacts(block_length=4)
GOLDEN = {
    (0.0, None): (0.8665279651203144, 0.30955222913309094),
    (0.3, None): (0.9288391466979482, 0.2964118287360789),
    (1.0, None): (1.074231903712427, 0.2657508944763844),
    (0.0, 5): (0.6552299941763137, 0.12957048439868615),
    (0.3, 5): (0.4214698572319756, 0.09853796189025919),
}
# The visible tokens of the completions in their rows. 38 is the mask; 37 follows an end of text (39).
SHOWN = [
    [3, 38, 14, 38, 21, 30, 38, 38],
    [38, 5, 8, 38, 38, 38, 38, 38],
    [12, 4, 38, 38, 38, 38, 38, 38],
    [38, 38, 38, 38, 37, 38, 38, 37],
    [11, 38, 38, 14, 38, 38, 38, 38],
    [38, 38, 38, 38, 38, 38, 14, 39],
    [6, 6, 38, 38, 38, 38, 38, 38],
    [38, 38, 6, 8, 10, 38, 14, 38],
]


def _batch() -> RolloutBatch:
    ids = torch.tensor(COMPLETIONS)
    is_end = ids == END
    return batch_of(
        prompts=torch.tensor([[row, 7] for row in range(8)]),
        completions=ids,
        lengths=torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, 8),
        steps=torch.tensor(STEPS),
        rewards=torch.zeros(8),
        truncated=~is_end.any(dim=1),
    )


class _Student:
    """A fake of `token_logps`: the divergences of its formula's logits, at a parameter of the policy."""

    moved = 0.0

    def __call__(
        self, module: Transformer, views: Views, _distribution: object, _device: object, states: TeacherStates
    ) -> Tensor:
        at_V, width = module.head.weight[0, 0], views.ids.shape[1]
        view_N, slot_N = views.slots[views.scored] // width, views.slots[views.scored] % width - PROMPT
        is_masked_VS = views.ids[:, PROMPT:] == MASK
        masked_N = is_masked_VS.view(len(views.ids), -1, 4).sum(dim=2)[view_N, slot_N // 4]
        row_N1, tokens = views.ids[view_N, :1], torch.arange(VOCABULARY)
        waves_NV = torch.sin(1.0 + slot_N[:, None] + 2.0 * row_N1 + 0.7 * tokens)
        logits_NV = at_V * waves_NV + 0.8 * torch.cos((0.5 + 0.05 * masked_N[:, None]) * tokens + row_N1)
        targets = Targets(slot=torch.arange(len(slot_N)), token=views.targets, teacher=states)
        return scoring.score_targets(logits_NV, torch.eye(VOCABULARY), targets)


def _teacher(_module: Transformer, views: Views, _device: object) -> Tensor:
    """A fake of `token_hidden_states`: the formula's logits after the tokens before each slot."""
    width, tokens = views.ids.shape[1], torch.arange(VOCABULARY)
    at_N, column_N = views.slots[views.scored] // width, views.slots[views.scored] % width
    total_N = views.ids.cumsum(dim=1)[at_N, column_N - 1]
    return 2.0 * torch.cos(0.13 * total_N[:, None] + 0.9 * tokens) + 0.1 * column_N[:, None] * torch.sin(tokens)


@pytest.mark.parametrize(("reverse_kl", "top_k"), GOLDEN)
def test_opdlm_equals_the_authors_code(
    reverse_kl: float, top_k: int | None, policy: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        policy.head.weight[0, 0] = 0.7
    monkeypatch.setattr(learner.learner, "token_logps", student := _Student())
    monkeypatch.setattr(learner.parallel.teacher, "token_hidden_states", _teacher)
    monkeypatch.setattr(ShardedPolicy, "gathered_head", lambda _: torch.eye(VOCABULARY))
    for probe in ("sampling_gap", "mask_variance"):
        monkeypatch.setattr(learner.learner, probe, lambda *_: {})
    settings = {"algorithm": "opdlm", "num_minibatches": 1, "objective": {"reverse_kl": reverse_kl, "top_k": top_k}}
    config = LearnerConfig.model_validate({"num_rounds": 1, **settings})
    trained = Learner(ShardedPolicy(policy, None), config, SAMPLER)
    steps = _Steps(policy, student, 0.0)  # type: ignore[arg-type]
    trained.optimizer = steps  # type: ignore[assignment]
    metrics = trained.update(_batch(), 0)
    loss, gradient = GOLDEN[reverse_kl, top_k]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert steps.gradients == [pytest.approx(gradient, rel=1e-4)]
    assert "token_logp" not in metrics


def test_block_states_equal_the_authors_code() -> None:
    batch = GroupedBatch.of(_batch())
    corruption = BlockStatesConfig().corrupt(batch, InnerUpdate(0, 1), SAMPLER)
    assert corruption.parts is not None
    found = batch.completion_ids.clone()
    for row, block, masked, scored in zip(
        corruption.rows, corruption.parts, corruption.masked, corruption.scored, strict=True
    ):
        own = slice(4 * block, 4 * block + 4)
        found[row, own] = torch.where(masked, MASK, batch.completion_ids[row])[own]
        assert not masked[: 4 * block].any()
        assert masked[4 * block + 4 :].all()
        is_text = torch.arange(8) < batch.completion_lengths[row] - (~batch.truncated[row]).long()
        assert torch.equal(scored[own], (masked & is_text)[own])
        assert int(scored.sum()) == int(scored[own].sum()) > 0
    # A block whose text is fully visible has no canvas.
    has_canvas = torch.zeros(8, 2, dtype=torch.bool)
    has_canvas[corruption.rows, corruption.parts] = True
    shown = torch.tensor(SHOWN)
    for row, block in has_canvas.nonzero().tolist():
        assert found[row, 4 * block : 4 * block + 4].tolist() == shown[row, 4 * block : 4 * block + 4].tolist()
    assert has_canvas.sum(dim=1).tolist() == [1, 1, 2, 1, 2, 2, 1, 2]


def test_states_of_a_block_are_equally_likely() -> None:
    batch = GroupedBatch.of((whole := _batch()).select(whole.truncated))
    shares = []
    for index in range(400):
        corruption = BlockStatesConfig().corrupt(batch, InnerUpdate(index, 400), SAMPLER)
        shares.append(corruption.scored.sum(dim=1).float() / 4)
    # The two states of a block of four slots mask four and two of them.
    found = torch.cat(shares)
    assert set(found.tolist()) == {0.5, 1.0}
    assert float(found.mean()) == pytest.approx(0.75, abs=0.02)


def test_scores_end_adds_the_end_of_text(rollouts: RolloutBatch) -> None:
    batch = GroupedBatch.of(rollouts)
    without, with_it = BlockStatesConfig(), BlockStatesConfig(scores_end=True)
    ends = (~batch.truncated).long()
    assert torch.equal(with_it.sizes(batch) - without.sizes(batch), ends)
    both = [estimator.corrupt(batch, InnerUpdate(0, 1), SAMPLER) for estimator in (without, with_it)]
    assert both[1].scored.sum() > both[0].scored.sum()


@pytest.mark.parametrize("reverse_kl", [0.0, 0.35, 1.0])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("excludes", [False, True])
def test_divergence_and_gradient_equal_plain_loops(
    reverse_kl: float, top_k: int | None, excludes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain loops over slots and tokens, in float64. Chunks hold two slots, and terms of different chunks share
    slots."""
    monkeypatch.setattr(scoring, "_MAX_LOGITS_CPU", 2 * 7)
    generator = torch.Generator().manual_seed(3)
    x_MD, weight_VD = torch.randn(4, 5, generator=generator), torch.randn(7, 5, generator=generator)
    head_input, head = torch.randn(5, 6, generator=generator), torch.randn(7, 6, generator=generator)
    slot_N, grad_N = torch.tensor([0, 1, 1, 2, 3]), torch.randn(5, generator=generator)
    states = TeacherStates(head_input=head_input, weight=head, reverse_kl=reverse_kl, top_k=top_k)
    targets = Targets(slot=slot_N, token=slot_N, temperature=0.8, mask_id=2, excludes_mask_id=excludes, teacher=states)
    leaves = [x_MD.requires_grad_(), weight_VD.requires_grad_()]
    found = scoring.score_targets(x_MD, weight_VD, targets)
    ours = torch.autograd.grad((found * grad_N).sum(), leaves)

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    values = []
    for term, slot in enumerate(slot_N.tolist()):
        logits = [(wide[0][slot] @ wide[1].T) / 0.8, (head_input[term].double() @ head.T.double()) / 0.8]
        kept = [token for token in range(7) if not (excludes and token == 2)]
        new, teacher = (dict(zip(kept, one[kept].log_softmax(0), strict=True)) for one in logits)
        counted = sorted(kept, key=lambda token: -float(teacher[token]))[:top_k]
        forward = sum(teacher[token].exp() * (teacher[token] - new[token]) for token in counted)
        reverse = sum(new[token].exp() * (new[token] - teacher[token]) for token in counted)
        values.append((1 - reverse_kl) * forward + reverse_kl * reverse)
    expected = torch.stack(values)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    derivatives = torch.autograd.grad((expected * grad_N).sum(), wide)
    for one, other in zip(ours, derivatives, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reverse_kl", [0.0, 0.35, 1.0])
def test_top_k_works_when_probabilities_underflow(reverse_kl: float) -> None:
    """In float32 all but the first token underflow: they are more than 104 nats below it."""
    logits_NV, teacher_NV = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    teacher_NV = 200.0 * teacher_NV
    slot_N = torch.arange(3)
    states = TeacherStates(head_input=teacher_NV, weight=torch.eye(12), reverse_kl=reverse_kl, top_k=3)
    targets = Targets(slot=slot_N, token=slot_N, teacher=states)
    found_N = scoring.score_targets(logits_NV.requires_grad_(), torch.eye(12), targets)
    (slope_NV,) = torch.autograd.grad(found_N.sum(), logits_NV)

    wide_NV = logits_NV.detach().double().requires_grad_()
    theirs_NK, ids_NK = teacher_NV.double().log_softmax(-1).topk(3)
    ours_NK = wide_NV.log_softmax(-1).gather(1, ids_NK)
    more_NK = theirs_NK - ours_NK
    expected_N = (((1 - reverse_kl) * theirs_NK.exp() - reverse_kl * ours_NK.exp()) * more_NK).sum(1)
    torch.testing.assert_close(found_N.double(), expected_N, atol=1e-4, rtol=1e-5)
    (expected_NV,) = torch.autograd.grad(expected_N.sum(), wide_NV)
    torch.testing.assert_close(slope_NV.double(), expected_NV, atol=1e-4, rtol=1e-4)


def test_a_loaded_teacher_equals_the_autoregressive_model(
    policy: Transformer, rollouts: RolloutBatch, tmp_path: Path
) -> None:
    """At every scored slot, given the tokens before it, while the policy has an adapter."""
    config = policy.config.model_copy(update={"family": "a2d-llama"})
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    save_checkpoint(tmp_path / "teacher", config, weights, tmp_path)
    adapted = ShardedPolicy(make_model(policy.config), None, lora=LoraConfig(rank=2, alpha=4.0))
    teacher = Teacher.load(tmp_path / "teacher", adapted, DistillationConfig())
    batch = GroupedBatch.of(rollouts)
    terms = make_terms(batch, policy.config, BlockStatesConfig().corrupt(batch, InnerUpdate(0, 1), SAMPLER))
    states = teacher.states(terms, batch)
    found_NV = states.head_input @ states.weight.T
    causal = make_model(policy.config.model_copy(update={"block_length": 1}))
    causal.load_state_dict(policy.state_dict())
    for term, (row, slot) in enumerate(zip(terms.rows.tolist(), terms.slots.tolist(), strict=True)):
        length = int(batch.prompt_lengths[row])
        ids = torch.cat((batch.prompt_ids[row, :length], batch.completion_ids[row, :slot]))
        torch.testing.assert_close(found_NV[term], causal(ids[None])[0, -1], atol=1e-5, rtol=1e-4)
    trained = Learner(adapted, LearnerConfig.model_validate({"algorithm": "opdlm", "num_rounds": 1}), SAMPLER, teacher)
    assert trained.update(rollouts, 0)["teacher_divergence"] > 0
    assert not any(parameter.requires_grad for parameter in teacher.model.module.parameters())


def test_distillation_ignores_rewards(policy: Transformer, rollouts: RolloutBatch) -> None:
    found = []
    for rewards in (rollouts.rewards, torch.zeros(12)):
        batch = replace(rollouts, rewards=rewards, correct=rewards > 0.5)
        config = LearnerConfig.model_validate({"algorithm": "opdlm", "num_rounds": 1, "num_minibatches": 1})
        copied = ShardedPolicy(policy, None).frozen_copy()
        copied.module.requires_grad_(True)
        trained = Learner(copied, config, SAMPLER)
        metrics = trained.update(batch, 0)
        assert metrics["num_trained_completions"] == 12
        found.append((metrics["loss"], copied.full_weights()))
    assert found[0][0] == found[1][0] > 0
    assert all(torch.equal(found[0][1][name], tensor) for name, tensor in found[1][1].items())


def test_distillation_lowers_the_divergence(policy: Transformer, rollouts: RolloutBatch) -> None:
    """Many updates on one batch."""
    settings = {"algorithm": "opdlm", "num_rounds": 1, "inner_updates": 25, "num_minibatches": 1, "lr": 1e-2}
    config = LearnerConfig.model_validate(settings | {"weight_decay": 0.0, "max_grad_norm": 10.0})
    trained = Learner(ShardedPolicy(policy, None), config, SAMPLER)
    losses = [trained.update(rollouts, 0)["teacher_divergence"] for _ in range(2)]
    assert losses[1] < 0.75 * losses[0]
