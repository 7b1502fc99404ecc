"""The shape of a policy network."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator

Family = Literal["llada", "dream"]


class TransformerConfig(BaseModel):
    """The shape of a policy network and the ids that have a meaning to it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    family: Family = "llada"
    """Whose configs, weight names and oddities the policy has."""
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
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    tied_embeddings: bool = False
    """Whether the head's matrix is the embedding's."""
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

    @model_validator(mode="after")
    def _ids(self) -> TransformerConfig:
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is no id of a vocabulary of {self.vocab_size}")
        if self.mask_token_id == self.eos_token_id:
            raise ValueError(f"mask_token_id and eos_token_id are both {self.mask_token_id}; they must differ")
        if self.family == "dream" and not self.qkv_bias:
            raise ValueError("qkv_bias is false; a Dream policy has biases, and its checkpoints have them")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linear layers, by name."""
        width, hidden, key_value = self.d_model, self.mlp_hidden_size, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (width, width),
            "k_proj": (width, key_value),
            "v_proj": (width, key_value),
            "out_proj": (width, width),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
        }
