"""Reference implementation of the LLaDA network and sampler, the baseline of the benchmarks.

`ReferenceNet` is LLaDA's published network on our weights: unfused float32 RMSNorm and rotary embedding, and logits of
every slot of every row. `generate` is the first d1's published sampler: static batches, blocks from left to right, a
fixed quota, Gumbel noise over the whole vocabulary, a top-k for each row, no early end. The published d1 also keeps
autograd on and empties the GPU's cache at every step. Both are omitted here, as they would only make it slower.

Shape letters: B rows, L slots, D width, H heads, E head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.model.config import TransformerConfig
from learner.model.transformer import Block, SwiGLU, Transformer
from rollout.request import SamplingParams


class Net(Protocol):
    """A network that maps canvases [B, L] to logits [B, L, V]."""

    config: TransformerConfig

    def __call__(self, ids_BL: Tensor, /) -> Tensor: ...


class ReferenceNet(nn.Module):
    """LLaDA's published forward, sharing weights with one of our networks."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        assert model.head is not None, "its head is a matrix of its own"
        self.model, self.config, self._head = model, model.config, model.head

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Compute logits [B, L, V] of every slot."""
        x = F.embedding(ids_BL, self.model.embed.weight)
        for block in self.model.blocks:
            assert isinstance(block, Block)
            x = self._block(block, x)
        return F.linear(self._norm(x, self.model.norm.weight), self._head.weight)

    def _block(self, block: Block, x: Tensor) -> Tensor:
        config, attn, mlp = self.config, block.attn, block.mlp
        assert isinstance(mlp, SwiGLU)
        B, L, D = x.shape
        normed = self._norm(x, block.attn_norm.weight)
        q = attn.q_proj(normed).view(B, L, config.num_heads, config.head_dim).transpose(1, 2)
        k = attn.k_proj(normed).view(B, L, config.num_kv_heads, config.head_dim).transpose(1, 2)
        v = attn.v_proj(normed).view(B, L, config.num_kv_heads, config.head_dim).transpose(1, 2)
        q, k = self._rotary(q, k)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False)
        x = x + attn.out_proj(attended.transpose(1, 2).contiguous().view(B, L, D))
        normed = self._norm(x, block.mlp_norm.weight)
        gate, up = mlp.gate_proj(normed), mlp.up_proj(normed)
        return x + mlp.down_proj(F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + self.config.rms_norm_eps)).to(x.dtype)

    def _rotary(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        width, L = self.config.head_dim, q.shape[-2]
        inverse = 1.0 / self.config.rope_theta ** (torch.arange(0, width, 2, device=q.device).float() / width)
        angles = torch.einsum("i , j -> i j", torch.arange(L, device=q.device).float(), inverse)
        angles = torch.cat((angles, angles), dim=-1)[None, None]
        sin, cos = angles.sin(), angles.cos()
        q_wide, k_wide = q.float(), k.float()
        q_turned = q_wide * cos + self._half_turned(q_wide) * sin
        k_turned = k_wide * cos + self._half_turned(k_wide) * sin
        return q_turned.type_as(q), k_turned.type_as(k)

    def _half_turned(self, x: Tensor) -> Tensor:
        B, H, L, E = x.shape
        first, second = x.view(B, H, L, 2, E // 2).unbind(dim=-2)
        return torch.cat((-second, first), dim=-1)


@dataclass(slots=True)
class Work:
    """Counts of a sampler's forwards and tokens."""

    num_forwards: int = 0
    num_tokens: int = 0


def add_gumbel_noise(logits: Tensor, temperature: float) -> Tensor:
    """Perturb logits so that their argmax is a sample at this temperature (float32; d1's trainer uses bfloat16)."""
    if temperature == 0:
        return logits
    noise = torch.rand_like(logits)
    return logits.exp() / (-torch.log(noise)) ** temperature


def num_transfer_tokens(mask_BK: Tensor, steps: int) -> Tensor:
    """Compute the number of slots that each row commits at each step, [B, steps]."""
    count_B = mask_BK.sum(dim=1, keepdim=True)
    base, remainder = count_B // steps, count_B % steps
    numbers = torch.zeros(mask_BK.size(0), steps, device=mask_BK.device, dtype=torch.int64) + base
    for row in range(mask_BK.size(0)):
        numbers[row, : remainder[row]] += 1
    return numbers


@torch.inference_mode()
def generate(net: Net, prompts_BP: Tensor, params: SamplingParams, work: Work | None = None) -> Tensor:
    """Sample completions [B, gen_length] of prompts of equal length."""
    mask_id, start, work = net.config.mask_token_id, prompts_BP.shape[1], work or Work()
    x = torch.full((len(prompts_BP), start + params.gen_length), mask_id, device=prompts_BP.device)
    x[:, :start] = prompts_BP
    for block in range(params.num_blocks):
        begin, end = start + block * params.block_length, start + (block + 1) * params.block_length
        numbers = num_transfer_tokens(x[:, begin:end] == mask_id, params.num_block_steps)
        for step in range(params.num_block_steps):
            is_masked = x == mask_id
            logits = net(x)
            drawn = add_gumbel_noise(logits, params.temperature).argmax(dim=-1)
            p = F.softmax(logits.to(torch.float32), dim=-1)
            drawn_p = torch.squeeze(torch.gather(p, dim=-1, index=torch.unsqueeze(drawn, -1)), -1)
            drawn_p[:, end:] = -torch.inf
            drawn = torch.where(is_masked, drawn, x)
            confidence = torch.where(is_masked, drawn_p, -torch.inf)
            chosen = torch.zeros_like(drawn, dtype=torch.bool)
            for row in range(len(x)):
                chosen[row, confidence[row].topk(int(numbers[row, step])).indices] = True
            x[chosen] = drawn[chosen]
            work.num_forwards += 1
            work.num_tokens += x.numel()
    return x[:, start:]


@torch.inference_mode()
def generate_lockstep(
    model: Transformer, prompts_BP: Tensor, params: SamplingParams, work: Work | None = None
) -> Tensor:
    """Decode by threshold in a static batch with a barrier at each block, as Fast-dLLM does, at temperature 0.

    It uses our network with the head on the block only, so that the comparison isolates the cost of the barriers.
    """
    assert params.threshold is not None
    mask_id, start, work = model.config.mask_token_id, prompts_BP.shape[1], work or Work()
    x = torch.full((len(prompts_BP), start + params.gen_length), mask_id, device=prompts_BP.device)
    x[:, :start] = prompts_BP
    for block in range(params.num_blocks):
        begin, end = start + block * params.block_length, start + (block + 1) * params.block_length
        columns = torch.arange(begin, end, device=x.device).expand(len(x), -1)
        while bool((x[:, begin:end] == mask_id).any()):
            scored = (x[:, begin:end] == mask_id).flatten().nonzero()[:, 0]
            logits = model(x, None, columns, scored)
            logits[:, mask_id] = -torch.inf
            top, token = logits.max(dim=-1)
            confidence = torch.full((columns.numel(),), -torch.inf, device=x.device)
            confidence[scored] = (top - logits.logsumexp(dim=-1)).exp()
            tokens = torch.zeros(columns.numel(), dtype=torch.int64, device=x.device)
            tokens[scored] = token
            confidence = confidence.view_as(columns)
            chosen = (confidence > params.threshold) | (confidence == confidence.amax(dim=1, keepdim=True))
            chosen &= x[:, begin:end] == mask_id
            x[:, begin:end] = torch.where(chosen, tokens.view_as(columns), x[:, begin:end])
            work.num_forwards += 1
            work.num_tokens += x.numel()
    return x[:, start:]
