"""Configuration of the policy network: family, shape, and special token ids."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from learner.model.attention.scaling import RotaryScaling
from learner.model.moe.config import MoEConfig

Family = Literal[
    "llada",
    "dream",
    "sdar",
    "sdar_moe",
    "llada2_moe",
    "a2d-llama",
    "a2d-qwen2",
    "a2d-qwen3",
    "illada",
    "llada_moe",
    "fast_dllm",
]


class _FamilyConstraints(NamedTuple):
    """Properties that a family fixes; None: a policy of the family may have either."""

    is_block_causal: bool | None
    predicts_next: bool | None
    qkv_bias: bool | None = None
    qk_norm: bool | None = None
    scales_positions: bool = False
    """Whether its rotary positions may be scaled."""
    router: str | None = None
    """Scoring function of its router; None: it has no experts."""
    is_normalised: bool | None = None
    """Whether the weights of a token's experts are normalised to sum to 1."""


def _adapted(*, qkv_bias: bool, qk_norm: bool) -> _FamilyConstraints:
    """Make the properties of a family converted from an autoregressive architecture."""
    return _FamilyConstraints(
        is_block_causal=None, predicts_next=None, qkv_bias=qkv_bias, qk_norm=qk_norm, scales_positions=True
    )


_FAMILY_CONSTRAINTS: dict[Family, _FamilyConstraints] = {
    "llada": _FamilyConstraints(is_block_causal=False, predicts_next=False),
    "dream": _FamilyConstraints(is_block_causal=False, predicts_next=True, qkv_bias=True),
    "sdar": _FamilyConstraints(is_block_causal=True, predicts_next=False),
    "sdar_moe": _FamilyConstraints(is_block_causal=True, predicts_next=False, router="softmax"),
    "llada2_moe": _FamilyConstraints(is_block_causal=True, predicts_next=False, router="sigmoid"),
    "a2d-llama": _adapted(qkv_bias=False, qk_norm=False),
    "a2d-qwen2": _adapted(qkv_bias=True, qk_norm=False),
    "a2d-qwen3": _adapted(qkv_bias=False, qk_norm=True),
    "illada": _FamilyConstraints(is_block_causal=False, predicts_next=False, qkv_bias=False, qk_norm=False),
    "llada_moe": _FamilyConstraints(
        is_block_causal=False, predicts_next=False, qkv_bias=False, qk_norm=True, router="softmax", is_normalised=False
    ),
    "fast_dllm": _FamilyConstraints(is_block_causal=True, predicts_next=True, qkv_bias=True, qk_norm=False),
}
_CONSTRAINT_MESSAGES = {
    "is_block_causal": ("is bidirectional and has none", "is block-causal and has one"),
    "predicts_next": ("predicts each slot at the slot itself", "predicts each slot at the slot before it"),
    "qkv_bias": ("has no biases", "has biases, and its checkpoints have them"),
    "qk_norm": ("does not normalise queries and keys", "normalises queries and keys"),
}


class TransformerConfig(BaseModel):
    """Shape of a policy network, and its special token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    family: Family = "llada"
    """Model family, which determines the config keys, the weight names and the fixed properties."""
    vocab_size: PositiveInt
    """Rows of the embedding and of the head; at least the tokenizer's size."""
    d_model: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Blocks."""
    num_heads: PositiveInt
    """Query heads; divides `d_model` if `head_width` is None."""
    num_kv_heads: PositiveInt
    """Key-value heads; divides `num_heads`."""
    head_width: PositiveInt | None = None
    """Width of one head; None: `d_model` is split among the query heads."""
    mlp_hidden_size: PositiveInt
    """Inner width of the SwiGLU in layers without experts."""
    moe: MoEConfig | None = None
    """The experts of the feed-forward layers; None: each is a dense SwiGLU."""
    max_sequence_length: PositiveInt
    """Longest canvas, in tokens."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    rotary_width: PositiveInt | None = None
    """Part of a head's width, from its beginning, that rotary positions rotate; None: all of it."""
    qk_norm: bool = False
    """Whether each query and each key is normalised over its head's width, before it is rotated."""
    block_length: PositiveInt | None = None
    """Default block length of block-causal attention, in slots: a slot sees its own block and all before it, counted
    from the first column of the canvas. None: attention is bidirectional."""
    predicts_next: bool = False
    """Whether the output at a slot predicts the slot after it, as in an autoregressive model."""
    tied_embeddings: bool = False
    """Whether the head's matrix is the embedding's."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RotaryScaling | None = None
    """Scaling of rotary positions; None: unscaled."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square before the root is taken."""
    mask_token_id: int
    """The id of a masked slot. Never sampled."""
    eos_token_id: int
    """End of text. Fills a completion's canvas to its end."""
    other_stop_ids: tuple[NonNegativeInt, ...] = ()
    """Other ids that end a completion, such as an end of turn."""
    pad_token_id: int
    """Pads rows to a common length; attention never sees it."""

    @model_validator(mode="after")
    def _divisible(self) -> TransformerConfig:
        if self.head_width is not None and self.head_width % 2:
            raise ValueError(f"head_width {self.head_width} must be even")
        if self.head_width is None and (self.d_model % self.num_heads or self.head_dim % 2):
            raise ValueError(f"num_heads {self.num_heads} must split d_model {self.d_model} into heads of even width")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_width {self.rotary_width} must be even, and at most a head's {self.head_dim}")
        return self

    @model_validator(mode="after")
    def _ids(self) -> TransformerConfig:
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is no id of a vocabulary of {self.vocab_size}")
        if self.mask_token_id in self.stop_ids:
            name = "eos_token_id" if self.mask_token_id == self.eos_token_id else "one of other_stop_ids"
            raise ValueError(f"mask_token_id and {name} are both {self.mask_token_id}; they must differ")
        if max(self.stop_ids) >= self.vocab_size:
            raise ValueError(f"other_stop_ids has {max(self.stop_ids)}, no id of a vocabulary of {self.vocab_size}")
        return self

    @model_validator(mode="after")
    def _family_facts(self) -> TransformerConfig:
        constraints = _FAMILY_CONSTRAINTS[self.family]
        for name in ("is_block_causal", "predicts_next", "qkv_bias", "qk_norm"):
            expected = getattr(constraints, name)
            if expected is not None and getattr(self, name) != expected:
                field = "block_length" if name == "is_block_causal" else name
                raise ValueError(
                    f"{field} is {getattr(self, field)}; a policy of the family {self.family} "
                    + _CONSTRAINT_MESSAGES[name][expected]
                )
        if self.rope_scaling is not None and not constraints.scales_positions:
            raise ValueError(f"rope_scaling is set; d1 computes it of no policy of the family {self.family}")
        return self

    @model_validator(mode="after")
    def _experts(self) -> TransformerConfig:
        router, is_normalised = _FAMILY_CONSTRAINTS[self.family].router, _FAMILY_CONSTRAINTS[self.family].is_normalised
        if (None if self.moe is None else self.moe.router) != router:
            what = "no experts" if router is None else f"experts behind a {router} router"
            raise ValueError(f"moe is {self.moe!r}; a policy of the family {self.family} has {what}")
        if self.moe is not None and is_normalised not in (None, self.moe.is_normalised):
            raise ValueError(
                f"moe.is_normalised is {self.moe.is_normalised}; a policy of the family {self.family} weighs "
                "experts by their scores"
            )
        if self.moe is not None and max(self.moe.dense_layers, default=0) >= self.num_layers:
            raise ValueError(f"moe.dense_layers has {max(self.moe.dense_layers)}, and num_layers is {self.num_layers}")
        return self

    @property
    def is_block_causal(self) -> bool:
        """Whether a slot sees only its own block and those before it."""
        return self.block_length is not None

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_width or self.d_model // self.num_heads

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Rotated part of a head's width."""
        return self.rotary_width or self.head_dim

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion; `eos_token_id` is first."""
        return (self.eos_token_id, *self.other_stop_ids)

    def experts_of(self, layer: int) -> MoEConfig | None:
        """Return the experts of the block with this index, from 0; None if it has a dense SwiGLU."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    def linear_layers(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of a block's linear layers, by name; with experts, those of the shared one."""
        moe = self.experts_of(layer)
        hidden = self.mlp_hidden_size if moe is None else moe.shared_width
        width, key_value = self.d_model, self.num_kv_heads * self.head_dim
        attention = {
            "q_proj": (width, self.attention_width),
            "k_proj": (width, key_value),
            "v_proj": (width, key_value),
            "out_proj": (self.attention_width, width),
        }
        if not hidden:
            return attention
        return attention | {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
