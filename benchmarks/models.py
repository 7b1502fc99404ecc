"""Random networks and prompts for the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.measure import peak_bytes
from benchmarks.reference import ReferenceNet, generate
from learner.model.adapter import Adapter
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Shape of a random network."""

    d_model: int
    num_layers: int
    num_heads: int
    vocab_size: int

    def with_vocabulary(self, vocab_size: int) -> Shape:
        """Copy the shape with another vocabulary size."""
        return replace(self, vocab_size=vocab_size)

    def config(self, max_tokens: int) -> TransformerConfig:
        """Make the network's config for canvases of `max_tokens`."""
        return TransformerConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            mlp_hidden_size=3 * self.d_model,
            max_sequence_length=max_tokens,
            mask_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )


LLADA_8B = Shape(d_model=4096, num_layers=32, num_heads=32, vocab_size=126464)
"""LLaDA-8B's shape. Mask and end-of-text ids differ, which does not affect the cost."""
CASES = {
    "d 256, 6 layers, V 1,536": Shape(d_model=256, num_layers=6, num_heads=8, vocab_size=1536),
    "d 128, 4 layers, V 16,384": Shape(d_model=128, num_layers=4, num_heads=4, vocab_size=16384),
}


def empty_policy(shape: Shape, max_tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """Allocate a policy with uninitialised weights directly on the device."""
    with torch.device("meta"):
        model = Transformer(shape.config(max_tokens)).to(dtype)
    return model.to_empty(device=device)


def make_policy(shape: Shape, max_tokens: int, device: str) -> Transformer:
    """Make a random policy with a sharpened head: near-uniform predictions would give no meaningful commit order.

    Row 0 of the head, the mask id's, is zero: the reference does not forbid sampling the mask.
    """
    model = Transformer(shape.config(max_tokens))
    init_weights(model, seed=0)
    assert model.head is not None, "the shape does not tie it"
    with torch.no_grad():
        model.head.weight.mul_(8.0)
        model.head.weight[0] = 0.0
    return model.to(device)


def make_prompts(count: int, length: int, vocab_size: int, device: str) -> Tensor:
    """Make random prompts [count, length]."""
    return torch.randint(2, vocab_size, (count, length), generator=torch.Generator().manual_seed(0)).to(device)


def peak_of_step(which: str, shape: Shape, batch: int, gen_length: int) -> int:
    """Measure the peak memory, in bytes, that one denoise step of `which` ("reference" or "d1") adds at T=0.9."""
    return peak_bytes(_one_step, which, shape, batch, gen_length)


def _one_step(is_warm_up: bool, which: str, shape: Shape, batch: int, gen_length: int) -> None:
    if is_warm_up:
        shape, batch, gen_length = shape.with_vocabulary(64), 1, 32
    prompt_length = 64
    params = SamplingParams(gen_length=gen_length, block_length=32, num_denoise_steps=gen_length // 32, temperature=0.9)
    model = make_policy(shape, prompt_length + gen_length, "cpu")
    prompts = make_prompts(batch, prompt_length, shape.vocab_size, "cpu")
    if which == "reference":
        generate(ReferenceNet(model), prompts, params)
    else:
        requests = [Request(prompt_ids=tuple(p), params=params, seed=i) for i, p in enumerate(prompts.tolist())]
        batch_of_slots = Sampler(model, 0).open(requests)
        batch_of_slots.step()
        batch_of_slots.step()


def random_adapter(model: Transformer, rank: int) -> Adapter:
    """Make a random LoRA adapter for every linear layer of the blocks, on the CPU."""
    matrices = {}
    for name, layer in model.blocks.named_modules():
        if isinstance(layer, torch.nn.Linear):
            matrices[f"blocks.{name}.lora_A.weight"] = 0.01 * torch.randn(rank, layer.in_features)
            matrices[f"blocks.{name}.lora_B.weight"] = 0.01 * torch.randn(layer.out_features, rank)
    return Adapter(rank=rank, alpha=rank, base="", matrices=matrices)
