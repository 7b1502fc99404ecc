"""Counted parameters and activation memory equal what PyTorch has of real policies."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.moe.config import MoEConfig
from learner.model.networks import make_model
from learner.model.transformer import init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig
from learner.planning.sizes import ParameterCounts, kept_bytes, saved_bytes_of_token

SDAR = {"family": "sdar", "block_length": 4, "qk_norm": True, "head_width": 48}
EXPERTS = MoEConfig(num_experts=16, experts_per_token=3, expert_width=48, router="softmax")
SHARED = EXPERTS.model_copy(update={"router": "sigmoid", "shared_width": 96})


EVERYWHERE = LoraConfig(rank=16)
FIRST_D1S = LoraConfig(rank=16, targets=("q_proj", "k_proj", "v_proj", "up_proj"))


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are allocated in its block, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()
        self.most = 0
        """Peak bytes."""

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude tensors that existed before."""
        self._given |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def num_bytes(self) -> int:
        """Return the live bytes."""
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and (key := made.untyped_storage()._cdata) not in self._given:
                self._storages[key] = StorageWeakRef(made.untyped_storage()), made.untyped_storage().nbytes()
        self.most = max(self.most, self.num_bytes())
        return result


def _kept_and_most(shape: TransformerConfig, lora: LoraConfig, *, checkpointed: bool, tokens: int) -> tuple[int, int]:
    """Return the bytes kept after a forward of `tokens` tokens, and the peak until its backward ends."""
    model = make_model(shape)
    init_weights(model, 0)
    policy = ShardedPolicy(model, None, ShardingConfig(activation_checkpointing=checkpointed), lora=lora)
    live = Live()
    live.leave_out(policy.tensors())
    with live:
        logits = model(torch.zeros(tokens // 64, 64, dtype=torch.int64))
        kept = live.num_bytes()
        logits.sum().backward()
    return kept, live.most


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [FULL_FINE_TUNING, EVERYWHERE, FIRST_D1S], ids=["whole", "everywhere", "first d1's"])
@pytest.mark.parametrize(
    "family", [{}, SDAR, SDAR | {"family": "sdar_moe", "moe": EXPERTS}, SDAR | {"family": "llada2_moe", "moe": SHARED}]
)
def test_kept_bytes_equal_what_autograd_keeps(
    config: TransformerConfig, family: dict[str, object], lora: LoraConfig, checkpointed: bool
) -> None:
    """Within 1 %: autograd also keeps one number per token for each norm, and attention's normaliser and mask."""
    changes = {"d_model": 128, "num_layers": 1, "num_kv_heads": 4, "mlp_hidden_size": 320}
    shape, tokens = config.model_copy(update=changes | family), 256
    wide = shape.model_copy(update={"num_layers": 3})
    thin_kept, wide_kept = (
        _kept_and_most(one, lora, checkpointed=checkpointed, tokens=tokens)[0] for one in (shape, wide)
    )
    counted = 4 * shape.d_model
    if not checkpointed:
        # On a CPU, a norm also keeps the values that it divided, for its weight's gradient.
        normed = 2 * shape.d_model + shape.qk_norm * (shape.attention_width + 4 * shape.head_dim)
        counted = saved_bytes_of_token(shape, lora, 4) + 4 * normed * (not lora.rank) + 4 * 64 * shape.is_block_causal
    # The last block saves different tensors. The two added before it are like all others.
    assert (wide_kept - thin_kept) / (2 * tokens) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_kept_bytes_equal_the_peak_of_an_update(config: TransformerConfig, checkpointed: bool) -> None:
    changes = {"d_model": 128, "num_layers": 12, "mlp_hidden_size": 384, "vocab_size": 16}
    shape, tokens = config.model_copy(update=changes), 2048
    _, most = _kept_and_most(shape, EVERYWHERE, checkpointed=checkpointed, tokens=tokens)
    assert most == pytest.approx(kept_bytes(shape, EVERYWHERE, tokens, 4, checkpointed=checkpointed), rel=0.1)


@pytest.mark.parametrize("lora", [FULL_FINE_TUNING, LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))])
def test_parameter_counts_equal_the_policys(
    config: TransformerConfig, moe_config: TransformerConfig, lora: LoraConfig
) -> None:
    grouped = config.model_copy(update={"family": "dream", "predicts_next": True, "num_layers": 3, "qkv_bias": True})
    dense = (grouped, grouped.model_copy(update={"tied_embeddings": True}), config.model_copy(update=SDAR))
    bare = moe_config.model_copy(update={"family": "sdar_moe", "moe": EXPERTS})
    for shape in (*dense, moe_config, bare):
        model = make_model(shape)
        counts = ParameterCounts.of(shape, lora)
        assert counts.policy == sum(parameter.numel() for parameter in model.parameters())
        of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
        assert counts.block == max(of_blocks)
        assert shape.moe is not None or counts.block == of_blocks[0]
        sharded = ShardedPolicy(copy.deepcopy(model), None, lora=lora)
        trained = sum(parameter.numel() for parameter in sharded.trained_parameters.values())
        assert trained == counts.trained
        assert counts.trained == (counts.adapter or counts.policy) or shape is moe_config
        of_block = [0] * shape.num_layers
        for name, matrix in sharded.adapter_on_rank_0().items():
            of_block[int(name.split(".")[1])] += matrix.numel()
        assert counts.adapter_of_block == max(of_block)
