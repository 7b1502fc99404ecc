"""`mapg` against its authors' own code: github.com/Haran71/mask-aware-policy-gradients at a7ff19d.

The numbers are the likelihoods, losses and advantages of their code for this file's policy, completions and drawn
segments. It ran three inner updates, with one completion per micro-batch as configured there. Its sampler denoises
every canvas to the end, so the completions that end early continued there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learner.advantages import Rewards, group_advantages
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts, TrajectoryConfig
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer
from learner.objectives import ClippedRatioConfig
from learner.parallel.sharding import ShardedPolicy
from tests.learner.batches import batch_of
from tests.learner.methods.test_algorithms import Recorder

END = 39
PROMPTS = [[3, 17, 8, 30]] * 4 + [[12, 5, 25, 9]] * 4
COMPLETIONS = [
    [4, 11, 29, 2, 33, 7, 18, 21],
    [9, 9, 1, 36, 14, 28, 0, END],
    [26, END, END, END, END, END, END, END],
    [13, 5, 31, 22, 8, END, END, END],
    [37, 10, 6, 6, 19, 24, 3, 15],
    [2, 32, 27, 16, 1, 20, 35, 12],
    [23, 34, 17, 8, END, END, END, END],
    [0, 25, 30, 4, 11, 29, END, END],
]
LENGTHS = [8, 8, 2, 6, 8, 8, 5, 7]
# Blocks of 4, one slot a step. Completions that end in the first block are not denoised further.
STEPS = [
    [2, 0, 3, 1, 6, 4, 5, 7],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 2, 3, 0, -1, -1, -1, -1],
    [3, 2, 1, 0, 7, 5, 6, 4],
    [1, 3, 0, 2, 5, 7, 4, 6],
    [2, 3, 1, 0, 6, 5, 7, 4],
    [1, 0, 2, 3, 4, 5, 6, 7],
    [0, 2, 1, 3, 7, 6, 5, 4],
]
REWARDS = [0.0, 2.0, 0.5, 1.0, 0.0, 0.125, 3.0, 0.0]
SETTINGS = {
    "algorithm": "mapg",
    "num_rounds": 1,
    "inner_updates": 3,
    "estimator": {"num_segments": 4, "num_sampled": 2},
}

# The segments drawn for each completion at each update, and their code's results for them.
DRAWN = [
    [[0, 1], [0, 3], [0], [0, 3], [0, 3], [0, 1], [0, 1], [0, 2]],
    [[0, 1], [0, 2], [0], [2, 3], [1, 2], [0, 1], [0, 1], [1, 2]],
    [[0, 2], [2, 3], [0], [0, 1], [2, 3], [1, 2], [0, 1], [2, 3]],
]
ADVANTAGES = [-1.1666666, 1.5, -0.5, 0.16666669, -1.0416666, -0.875, 2.9583333, -1.0416666]
LOSSES = [0.0, 0.00405854, 0.00699038]
# Ratios, of tokens and of orders, whose gradient the clip removes: 3 + 3 of 16 at the second update, then 4 + 3.
CLIPPED = [0, 6, 7]
# Mean over the tokens scored at the three updates.
TOKEN_LOGP = -4.315854
NORMS = [5.2208313, 10.2708035, 7.9791436]
# Sum of each parameter's gradient times `wave_of(parameter, 0.51)`, at each update.
GRADIENTS = {
    "embed.weight": [-0.544367, -0.562357, 0.00370116],
    "blocks.0.attn.v_proj.weight": [-0.601346, 1.68818, 1.22682],
    "blocks.1.attn.v_proj.weight": [-0.475458, -0.669016, -0.375353],
    "blocks.1.mlp.down_proj.weight": [0.791466, -0.609658, -0.787791],
    "norm.weight": [-1.20684, 4.64051, 3.9767],
    "head.weight": [0.47187, 0.344475, 0.0628343],
}


def policy() -> Transformer:
    """Return a policy whose weights are given by a formula."""
    model = Transformer(
        TransformerConfig(
            vocab_size=40,
            d_model=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            mlp_hidden_size=48,
            max_sequence_length=64,
            mask_token_id=38,
            eos_token_id=END,
            pad_token_id=END,
        )
    )
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            wave = wave_of(parameter, 0.37 * (index + 1))
            parameter.copy_(1 + 0.1 * wave if parameter.dim() == 1 else 0.3 * wave)
        # Sharper logits, whose normalizers differ between slots.
        model.head.weight.mul_(4.0)
    return model


def wave_of(parameter: Tensor, frequency: float) -> Tensor:
    """Return a sine over all elements of a parameter."""
    return (torch.arange(parameter.numel(), dtype=torch.float64) * frequency).sin().view(parameter.shape).float()


def moved(model: Transformer) -> Transformer:
    """Apply an optimizer step given by a formula."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(2e-4 * wave_of(parameter, 0.73 + index))
    return model


def rollouts() -> RolloutBatch:
    """Two groups of four completions."""
    return batch_of(
        prompts=torch.tensor(PROMPTS),
        completions=torch.tensor(COMPLETIONS),
        lengths=torch.tensor(LENGTHS),
        steps=torch.tensor(STEPS),
        rewards=torch.tensor(REWARDS),
        correct=torch.tensor(REWARDS) > 1,
        truncated=torch.zeros(8, dtype=torch.bool),
    )


def drawn(config: LearnerConfig) -> list[list[list[int]]]:
    """Return the segments drawn for each update and completion."""
    batch, found = GroupedBatch.of(rollouts()), []
    for index in range(3):
        corruption = config.estimator.corrupt(batch, InnerUpdate(index, 3), SamplerFacts(block_length=4))
        assert corruption.parts is not None
        found.append([corruption.parts[corruption.rows == row].tolist() for row in range(8)])
    return found


def test_the_defaults_are_the_authors_settings() -> None:
    """Settings of map/configs/gsm8k.yaml."""
    config = LearnerConfig.model_validate({"algorithm": "mapg", "num_rounds": 1})
    estimator, objective = config.estimator, config.objective
    assert isinstance(estimator, TrajectoryConfig)
    assert isinstance(objective, ClippedRatioConfig)
    assert (config.inner_updates, config.group_size, estimator.num_segments, estimator.num_sampled) == (12, 4, 32, 12)
    assert (objective.clip_low, objective.clip_high, objective.order_temperature) == (3e-4, 4e-4, 1.0)
    assert (objective.kl_coef, estimator.p_mask_prompt) == (0.0, 0.0)


def test_losses_and_gradients_equal_the_public_code() -> None:
    config = LearnerConfig.model_validate(SETTINGS)
    assert drawn(config) == DRAWN
    batch = rollouts()
    rewards = Rewards.of(batch)
    assert group_advantages(rewards, config.advantage).tolist() == pytest.approx(ADVANTAGES, abs=1e-6)
    model = policy()
    learner = Learner(ShardedPolicy(model, None), config, SamplerFacts(block_length=4))
    recorder = Recorder(model, moved)
    learner.optimizer = recorder  # type: ignore[assignment]
    metrics = learner.update(batch, 0)
    # Advantages of up to 3 times ratios of about 1 cancel. In float64 it is 0.0036831001. Theirs is 1.3e-7 off, ours at
    # most 1.1e-7 to the other side, depending on the processor.
    assert metrics["loss"] == pytest.approx(sum(LOSSES) / 3, abs=5e-7)
    assert metrics["token_logp"] == pytest.approx(TOKEN_LOGP, abs=1e-6)
    # Each completion has one ratio for its tokens and one for their order.
    assert metrics["clip_ratio/region_mean"] == pytest.approx(sum(CLIPPED) / (3 * 2 * 8))
    for index, gradients in enumerate(recorder.gradients):
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        assert float(norm) == pytest.approx(NORMS[index], rel=1e-5)
        for name, values in GRADIENTS.items():
            found = float((gradients[name] * wave_of(gradients[name], 0.51)).sum())
            assert found == pytest.approx(values[index], abs=1e-5, rel=1e-5), (index, name)
