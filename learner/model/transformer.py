"""LLaDA's architecture: a bidirectional transformer that predicts every masked slot at once.

RoPE, RMSNorm before each sublayer, SwiGLU, no bias, no dropout (LLaDA, arXiv 2502.09992, section 2 and its
published modeling code). There is no dropout anywhere, so training and evaluation mode are the same function:
the likelihood that the learner computes is the one that the sampler had.

Shape letters: B rows, L slots, D width, H query heads, K key-value heads, E head width, V vocabulary, N scored slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn


class TransformerConfig(BaseModel):
    """The shape of a policy network and the ids that have a meaning to it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    vocab_size: PositiveInt
    """Rows of the embedding and of the head; at least the tokenizer's size."""
    d_model: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Blocks."""
    num_heads: PositiveInt
    """Query heads; divides `d_model`."""
    num_kv_heads: PositiveInt
    """Key-value heads; divides `num_heads`."""
    mlp_hidden_size: PositiveInt
    """Inner width of the SwiGLU."""
    max_sequence_length: PositiveInt
    """Longest canvas, in tokens."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square before its root."""
    mask_token_id: int
    """The id that a masked slot holds. Never sampled."""
    eos_token_id: int
    """End of text. Fills a completion's canvas to its end."""
    pad_token_id: int
    """Fills rows to a common length; attention never sees it."""

    @model_validator(mode="after")
    def _divisible(self) -> TransformerConfig:
        if self.d_model % self.num_heads or (self.d_model // self.num_heads) % 2:
            raise ValueError(f"num_heads {self.num_heads} must split d_model {self.d_model} into heads of even width")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads


class Attention(nn.Module):
    """Bidirectional attention with rotary positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], key_mask: Tensor | None) -> Tensor:
        B, L, D = x_BLD.shape
        q_BHLE = self.q_proj(x_BLD).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        k_BKLE = self.k_proj(x_BLD).view(B, L, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v_BKLE = self.v_proj(x_BLD).view(B, L, self.num_kv_heads, self.head_dim).transpose(1, 2)
        mixed_BHLE = F.scaled_dot_product_attention(
            apply_rope(q_BHLE, rope),
            apply_rope(k_BKLE, rope),
            v_BKLE,
            attn_mask=key_mask,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.out_proj(mixed_BHLE.transpose(1, 2).reshape(B, L, D))


class SwiGLU(nn.Module):
    """The feed-forward sublayer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_hidden_size, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer block: the unit that FSDP shards."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.rms_norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], key_mask: Tensor | None) -> Tensor:
        x_BLD = x_BLD + self.attn(self.attn_norm(x_BLD), rope, key_mask)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Transformer(nn.Module):
    """The policy: canvases in, logits of the asked slots out."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, ids_BL: Tensor, lengths_B: Tensor | None = None, slots_N: Tensor | None = None) -> Tensor:
        """Logits of canvases.

        Args:
            ids_BL: token ids; each row is left-aligned, positions count from 0.
            lengths_B: used slots of each row; the rest is padding that no slot attends to. None: rows are full.
            slots_N: the slots to score, as indices into the flattened [B * L] canvas: the head, much the widest
                matrix, runs on these alone. None scores all.

        Returns:
            [N, V], or [B, L, V] without `slots_N`.

        Raises:
            ValueError: the canvas is longer than `max_sequence_length`.
        """
        L = ids_BL.shape[1]
        if self.config.max_sequence_length < L:
            raise ValueError(f"a canvas of {L} tokens exceeds max_sequence_length {self.config.max_sequence_length}")
        x_BLD = self.embed(ids_BL)
        rope = rope_tables(L, self.config, ids_BL.device)
        key_mask = None
        if lengths_B is not None:
            key_mask = (torch.arange(L, device=ids_BL.device) < lengths_B[:, None])[:, None, None, :]
        for block in self.blocks:
            x_BLD = block(x_BLD, rope, key_mask)
        if slots_N is not None:
            return self.head(self.norm(x_BLD.flatten(0, 1)[slots_N]))
        return self.head(self.norm(x_BLD))


def rope_tables(length: int, config: TransformerConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, E] of the rotary embedding, in float32 as LLaDA's `rope_full_precision`."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + E/2) of the last axis of x [..., L, E] by their position, in float32."""
    cos, sin = rope
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def init_weights(model: Transformer, seed: int, scale: float = 1.0) -> None:
    """Fill a fresh network, determined by `seed` alone.

    Weights are normal with standard deviation scale / sqrt(fan-in); the two matrices that write into the residual
    stream are divided by sqrt(2 * layers), so that its variance does not grow with depth (GPT-2, section 2.3).
    """
    generator = torch.Generator().manual_seed(seed)
    depth_scale = (2 * model.config.num_layers) ** -0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            std = scale * weight.shape[1] ** -0.5
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                std *= depth_scale
            weight.normal_(0.0, std, generator=generator)
