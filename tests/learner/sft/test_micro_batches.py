"""SFT micro-batches: gradients add up to the whole batch's, and rows stay within the token limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig
from learner.model.networks import make_model
from learner.model.transformer import init_weights
from learner.optimizer import StepResult
from learner.parallel import sharding
from learner.parallel.sharding import ShardedPolicy
from learner.sft.config import SftConfig
from learner.sft.documents import TokenizedExample, make_documents
from learner.sft.learner import SftLearner
from learner.sft.masking import mask_documents
from learner.sft.micro_batches import micro_batches

LENGTHS = (12, 5, 9, 6, 12, 7, 5)
"""Tokens of each document, including its end of text."""
MASK_ID, EOS_ID = 38, 39
CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "by slot": {"normalize_by": "slot"},
    "with trained padding": {"eos_padding": "trained"},
    "packed": {"packing": True},
    "under annealed attention": {"attention_annealing_steps": 10, "num_steps": 10},
}


def _examples() -> list[TokenizedExample]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(0, 38, (length - 1,), generator=generator).tolist() for length in LENGTHS]
    return [TokenizedExample(prompt_ids=tuple(ids[:3]), completion_ids=tuple(ids[3:]), num_slots=10) for ids in drawn]


class _Recorder:
    """A fake optimizer: records the gradients of a step."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self._policy = policy
        self.gradients: dict[str, Tensor] = {}
        self.loss = 0.0

    def step(self, lr: float, max_grad_norm: float, loss: Tensor) -> StepResult:
        parameters = self._policy.trained_parameters.items()
        self.gradients = {name: weight.grad.clone() for name, weight in parameters if weight.grad is not None}
        self.loss = float(loss)
        return StepResult(loss=self.loss, grad_norm=0.0)


def _step(config: TransformerConfig, lora: LoraConfig | None = None, **sft: Any) -> tuple[_Recorder, list[torch.Size]]:
    """Run one step on all documents; return its record and the shape of each forward."""
    model = make_model(config)
    init_weights(model, seed=0)
    shapes: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _module, arguments: shapes.append(arguments[0].shape))
    policy = ShardedPolicy(model, None, lora=lora or LoraConfig(), seed=1)
    if lora is not None:
        # A fresh adapter changes nothing, and half of it has no gradient.
        for weight in policy.trained_parameters.values():
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(3))
    settings = {"num_labels": 7, "num_steps": 1, "batch_size": 7, "eos_padding": "ignored"} | sft
    documents = make_documents(_examples(), EOS_ID, trains_padding=settings["eos_padding"] == "trained")
    learner = SftLearner(policy, SftConfig(**settings), documents, seed=0)
    recorder = _Recorder(policy)
    learner.optimizer = recorder  # type: ignore[assignment]
    learner.step(4, lr=0.0)
    return recorder, shapes


def _check(config: TransformerConfig, max_tokens: int, lora: LoraConfig | None = None, **sft: Any) -> list[torch.Size]:
    """Assert that small micro-batches add up to the whole batch; return the shapes of their forwards."""
    (whole, of_whole), (parts, shapes) = (
        _step(config, lora, micro_batch_tokens=tokens, **sft) for tokens in (None, max_tokens)
    )
    assert len(of_whole) == 1 < len(shapes)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.gradients.keys() == whole.gradients.keys()
    for name, gradient in whole.gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(parts.gradients[name], gradient, atol=2e-6, rtol=1e-4, msg=name)
    return shapes


@pytest.mark.parametrize("max_tokens", [1, 13, 26])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    config: TransformerConfig, case: dict[str, Any], max_tokens: int
) -> None:
    for shape in _check(config, max_tokens, **case):
        assert shape.numel() <= max_tokens or shape[0] == 1, "a row that is longer stands alone"


def test_micro_batches_add_up_with_an_adapter(config: TransformerConfig) -> None:
    _check(config, 20, LoraConfig(rank=4, alpha=8))


def test_micro_batches_add_up_when_rows_are_packed(config: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or not: without padding, tokens are counted exactly."""
    monkeypatch.setattr(sharding, "has_kernel", lambda *_: True)
    for packing in (False, True):
        sizes = [shape.numel() for shape in _check(config, 24, packing=packing)]
        assert len(sizes) == 3, "with padding they are more"
        assert max(sizes) <= 24
        assert sum(sizes) == sum(LENGTHS)


def test_micro_batches_add_up_for_a_block_causal_policy(config: TransformerConfig) -> None:
    blocks = TransformerConfig(**config.model_dump() | {"family": "sdar", "block_length": 4, "qk_norm": True})
    for shape in _check(blocks, 30):
        assert shape.numel() <= 30 or shape[0] == 1


def test_block_causal_rows_count_their_noisy_states(config: TransformerConfig) -> None:
    """A document without a masked slot has no states. With all masked, it has a state per block after the clean blocks
    but the last."""
    documents = make_documents(
        [TokenizedExample(prompt_ids=(1,), completion_ids=(2,) * 10, num_slots=11)] * 3, EOS_ID, trains_padding=True
    )
    masked = mask_documents(documents, MASK_ID, torch.tensor([1.0, 0.0, 1.0]), (0,))
    # Two clean blocks and three states: 20 slots.
    for max_tokens, expected in ((39, [1, 1, 1]), (40, [2, 1]), (59, [2, 1]), (60, [3])):
        parts = micro_batches(masked, max_tokens, 4, packing=False, concatenates_rows=False)
        assert [len(part.lengths) for part in parts] == expected, max_tokens


def test_a_weightless_micro_batch_has_no_gradient(config: TransformerConfig) -> None:
    """A rank runs these while another still has work."""
    model = make_model(config)
    init_weights(model, seed=0)
    learner = SftLearner(
        ShardedPolicy(model, None),
        SftConfig(num_labels=7, num_steps=1, micro_batch_tokens=20),
        make_documents(_examples(), EOS_ID, trains_padding=True),
        seed=0,
    )
    masked = mask_documents(
        make_documents(_examples(), EOS_ID, trains_padding=True), MASK_ID, torch.full((7,), 0.9), (0,)
    )
    idle = masked.weightless()
    assert len(idle.lengths) == 1 <= len(idle.targets)
    learner._loss(idle, None, concatenates_rows=False).backward()
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)
