"""Transformer of masked diffusion language models, which predicts all masked slots at once.

RoPE, RMSNorm before each sublayer, SwiGLU (LLaDA, arXiv 2502.09992, section 2, and Dream, arXiv 2508.15487, section 3,
with their published modeling code). There is no dropout, so training and evaluation mode compute the same function:
learner and sampler agree on the likelihood.

Rows of unequal length share a batch: each is left-aligned, its positions count from 0, and no slot attends beyond its
row's length. So the logits of a canvas do not depend on the other rows. Several short canvases can also be packed into
one row as documents; each has the same logits as in a separate row.

Shape letters: B rows, L slots, Q queried slots of a row, D width, H query heads, K key-value heads, E head width,
V vocabulary, N scored slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from learner.model.attention.masks import (
    AttentionMask,
    Pattern,
    annealed,
    block_causal,
    clean_and_noisy,
    make_mask,
    positions_in_documents,
    within_documents,
)
from learner.model.attention.rotary import rope_tables
from learner.model.attention.rows import RaggedRows
from learner.model.attention.varlen import VarlenAttention
from learner.model.config import TransformerConfig
from learner.model.elementwise import ElementwiseModule, rms_norm
from learner.model.kv_cache import KVCache, LayerKVCache
from learner.model.moe.experts import SparseMLP
from learner.model.scoring import score_targets
from learner.model.targets import Targets


class Attention(ElementwiseModule):
    """Attention of the queried slots over the whole canvas, with rotary positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        # Not in the forward: a compiler may treat the numbers of heads as symbols, whose comparison is not a bool.
        self.is_grouped = config.num_heads != config.num_kv_heads
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, config.attention_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.attention_width, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x_BLD: Tensor, inputs: AttentionInputs, queried: Queries | None, kv_cache: LayerKVCache | None
    ) -> Tensor:
        """Compute the attention output [B, L, D], or [N, D] of `queried`, before the residual addition."""
        k_BKLE = self._placed(self._heads(self.k_proj(x_BLD), self.num_kv_heads), self.k_norm, inputs.rope)
        v_BKLE = self._heads(self.v_proj(x_BLD), self.num_kv_heads)
        if kv_cache is not None:
            k_BKLE, v_BKLE = kv_cache.update(inputs.columns, k_BKLE, v_BKLE)
        rope = inputs.rope
        if queried is not None:
            x_BLD, rope = queried.of_rows(x_BLD), queried.of_rope(rope)
        q_BHQE = self._placed(self._heads(self.q_proj(x_BLD), self.num_heads), self.q_norm, rope)
        mask = inputs.mask if queried is None else inputs.query_mask
        mixed_BHQE = self._attend(q_BHQE, k_BKLE, v_BKLE, mask)
        mixed_BQD = mixed_BHQE.transpose(1, 2).flatten(2)
        return self.out_proj(mixed_BQD if queried is None else queried.scored(mixed_BQD))

    def _placed(self, x_BHLE: Tensor, norm: RMSNorm | None, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Normalize queries or keys, where the family does, and rotate them by their positions."""
        weight_E, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self.elementwise.norm_and_rotate(x_BHLE, weight_E, eps, *rope)

    def _attend(self, q_BHQE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, mask: AttentionMask) -> Tensor:
        if isinstance(mask, VarlenAttention):
            return mask.attend(q_BHQE, k_BKLE, v_BKLE)
        is_grouped = self.is_grouped
        if isinstance(mask, BlockMask):
            mixed = flex_attention(q_BHQE, k_BKLE, v_BKLE, block_mask=mask, enable_gqa=is_grouped)
            assert isinstance(mixed, Tensor), "without statistics it is the output alone"
            return mixed
        if is_grouped and mask is not None:
            # No fused GPU kernel supports grouped heads together with a mask.
            copies, is_grouped = self.num_heads // self.num_kv_heads, False
            k_BKLE, v_BKLE = k_BKLE.repeat_interleave(copies, dim=1), v_BKLE.repeat_interleave(copies, dim=1)
        return F.scaled_dot_product_attention(q_BHQE, k_BKLE, v_BKLE, attn_mask=mask, enable_gqa=is_grouped)

    def _heads(self, x_BLD: Tensor, num_heads: int) -> Tensor:
        return x_BLD.unflatten(-1, (num_heads, self.head_dim)).transpose(1, 2)


class SwiGLU(ElementwiseModule):
    """SwiGLU feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.elementwise.gated(self.gate_proj(x), self.up_proj(x)))


class RMSNorm(nn.RMSNorm):
    """RMSNorm with a faster CPU path for inference (`rms_norm`)."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Divide each vector by its root mean square, and multiply it by the weight."""
        return rms_norm(x, self.weight, self.eps)


class Block(ElementwiseModule):
    """One transformer block: the unit that FSDP shards."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model, eps=config.rms_norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.rms_norm_eps)
        self.mlp = _feed_forward(config, layer)

    def forward(
        self,
        x_BLD: Tensor,
        inputs: AttentionInputs,
        queried: Queries | None = None,
        kv_cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Compute the residual stream after this block: [B, L, D], or [N, D] of `queried`."""
        mixed = self.attn(self.attn_norm(x_BLD), inputs, queried, kv_cache)
        residual = x_BLD if queried is None else queried.scored(queried.of_rows(x_BLD))
        x, normed = self.elementwise.add_and_norm(mixed, residual, self.mlp_norm.weight, self.mlp_norm.eps)
        after: Tensor = self.mlp(normed)
        # Not in place for experts: their output is a view, and an in-place addition would remove FSDP's hook.
        return after + x if isinstance(self.mlp, SparseMLP) else after.add_(x)


def _feed_forward(config: TransformerConfig, layer: int) -> SwiGLU | SparseMLP:
    moe, width = config.experts_of(layer), config.d_model
    if moe is None:
        return SwiGLU(width, config.mlp_hidden_size)
    return SparseMLP(width, moe, SwiGLU(width, moe.shared_width) if moe.shared_width else None)


class Transformer(nn.Module):
    """Policy network: maps canvases to the logits of the queried slots."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        # Not torch's random initialization: on the meta device that imports torch's compiler, which takes a second in
        # every process that loads a policy.
        self.embed = nn.Embedding.from_pretrained(torch.zeros(config.vocab_size, config.d_model), freeze=False)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, eps=config.rms_norm_eps)
        self.head = None if config.tied_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self,
        ids_BL: Tensor,
        lengths_B: Tensor | None = None,
        queries_BQ: Tensor | None = None,
        scored_N: Tensor | None = None,
        *,
        kv_cache: KVCache | None = None,
        columns_BL: Tensor | None = None,
        documents_BL: Tensor | None = None,
        block_lengths_B: Tensor | None = None,
        states_BL: Tensor | None = None,
        ragged: RaggedRows | None = None,
        annealing_mask_SS: Tensor | None = None,
        flex: bool = False,
        targets: Targets | None = None,
        before_head: bool = False,
    ) -> Tensor:
        """Compute the logits of canvases, or the log-probabilities of target tokens.

        Args:
            ids_BL: token ids; each row is left-aligned, positions count from 0.
            lengths_B: used slots of each row; the rest is padding that no slot attends to. None: rows are full.
            queries_BQ: the columns of `ids_BL` to predict. The last block and the head, by far the widest matrix, run
                on these alone. None: all columns.
            scored_N: the queried slots, as indices into the flattened [B * Q], that the last feed-forward and the head
                run on. None: all.
            kv_cache: of the whole canvases, from earlier forwards; this forward's keys and values are written to it.
            columns_BL: columns of `ids_BL` in their canvases, if they are only a part of them; with `kv_cache` or
                `states_BL`.
            documents_BL: document of each slot, for rows of several contiguous documents; padding is a document too.
                Positions count from 0 in each, and no slot sees another document. Excludes `lengths_B` and `kv_cache`.
                None: a row is one canvas.
            block_lengths_B: block length of each row, for block-causal policies alone. None: the config's
                `block_length`.
            states_BL: for block-causal policies, for rows of a clean canvas and noisy states of its blocks
                (`clean_and_noisy`): the state of each slot, `CLEAN` for the canvas, `PADDING` for padding. `columns_BL`
                is then each slot's column in the canvas. Excludes `lengths_B` and `kv_cache`.
            ragged: for bidirectional policies: the rows that are concatenated without padding in `ids_BL`, a single
                row. Positions count from 0 in each, and no slot sees another row. `queries_BQ` has as many columns as
                `ragged.queries` counts. Excludes all other arguments that restrict attention.
            annealing_mask_SS: an attention mask over the columns of a canvas, applied on top of the policy's own, for
                attention annealing (`learner/sft/annealing.py`); not with `kv_cache`. None: the policy's own attention.
            flex: use FlexAttention, which skips hidden slots, instead of a mask. Meant to be compiled, and for
                inference only.
            targets: target tokens at the scored slots; only their log-probabilities are computed.
            before_head: return the head's input, [N, D], instead of logits.

        Returns:
            [N, V] with `scored_N`, otherwise [B, Q, V] (Q = L without `queries_BQ`). With `targets`, a float32 [N]: the
            log-probability in nats of each target, or what else `Targets` requests.

        Raises:
            ValueError: the canvas is longer than `max_sequence_length`.
        """
        if documents_BL is not None:
            positions_BL: Tensor | None = positions_in_documents(documents_BL)
        else:
            positions_BL = columns_BL if ragged is None else ragged.positions
        queries_BQ = self._all_columns(ids_BL) if queries_BQ is None else queries_BQ
        queries_BQ = self._predicting(
            queries_BQ, positions_BL, None if states_BL is None else self._block_length(block_lengths_B)
        )
        shape = queries_BQ.shape if scored_N is None else scored_N.shape
        if scored_N is None:
            scored_N = torch.arange(queries_BQ.numel(), device=ids_BL.device)
        inputs = self._attention_inputs(
            ids_BL,
            queries_BQ,
            lengths_B=lengths_B,
            kv_cache=kv_cache,
            positions_BL=positions_BL,
            columns_BL=columns_BL,
            documents_BL=documents_BL,
            block_lengths_B=block_lengths_B,
            states_BL=states_BL,
            ragged=ragged,
            annealing_mask_SS=annealing_mask_SS,
            flex=flex,
        )
        x_ND = self._head_input(ids_BL, inputs, Queries(queries_BQ, scored_N), kv_cache)
        if before_head:
            return x_ND
        if targets is not None:
            return score_targets(x_ND, self._head_weight, targets)
        logits_NV = self._logits(x_ND)
        return logits_NV.view(*shape, logits_NV.shape[-1])

    @property
    def is_cache_exact(self) -> bool:
        """Whether keys and values of a finished block do not depend on later blocks. In a bidirectional model they do,
        so sampling with a KV cache is approximate."""
        return self.config.is_block_causal

    def predicting_columns(self, columns_BQ: Tensor) -> Tensor:
        """Return the columns of a canvas whose output predicts the tokens at `columns_BQ`: the same, or the preceding.

        The first column has no predecessor and predicts itself.
        """
        return (columns_BQ - 1).clamp(min=0) if self.config.predicts_next else columns_BQ

    def _predicting(self, queries_BQ: Tensor, positions_BL: Tensor | None, block_length: Tensor | int | None) -> Tensor:
        """Return the slots of a row whose output predicts the queried ones.

        Args:
            queries_BQ: the queried slots.
            positions_BL: position of each slot in its canvas or document; None: its column in the row.
            block_length: block length, for rows with `states_BL`. The first slot of a state is then predicted by the
                last clean slot before its block, which a sampler has finished. The row begins with the clean canvas.
        """
        if positions_BL is None or not self.config.predicts_next:
            return self.predicting_columns(queries_BQ)
        here_BQ = positions_BL.gather(1, queries_BQ)
        predicting_BQ = self.predicting_columns(here_BQ)
        beside_BQ = queries_BQ + predicting_BQ - here_BQ
        if block_length is None:
            return beside_BQ
        length = block_length if isinstance(block_length, int) else block_length[:, None]
        return torch.where(predicting_BQ // length == here_BQ // length, beside_BQ, predicting_BQ)

    def _block_length(self, block_lengths_B: Tensor | None) -> Tensor | int:
        """Return the block length: of each row, or the config's."""
        if block_lengths_B is not None:
            return block_lengths_B
        assert self.config.block_length is not None, "only block-causal policies have one"
        return self.config.block_length

    def pattern(self, lengths_B: Tensor | None, block_lengths_B: Tensor | None = None) -> Pattern | None:
        """Return the attention pattern: each slot sees every used slot of its row; None: every slot sees all.

        In a block-causal policy a slot sees no later block (block diffusion, arXiv 2503.09573; SDAR, arXiv 2510.06303).
        Blocks are counted from the first column of a canvas, not from a prompt's end. For a row of several documents
        this is the pattern of each: `within_documents` makes that of the row.
        """
        if self.config.is_block_causal:
            return block_causal(self._block_length(block_lengths_B), lengths_B)
        assert block_lengths_B is None, "nothing is hidden by blocks here"
        return None if lengths_B is None else lambda row, _query, column: column < lengths_B[row]

    def _attention_inputs(
        self,
        ids_BL: Tensor,
        queries_BQ: Tensor,
        *,
        lengths_B: Tensor | None,
        kv_cache: KVCache | None,
        positions_BL: Tensor | None,
        columns_BL: Tensor | None,
        documents_BL: Tensor | None,
        block_lengths_B: Tensor | None,
        states_BL: Tensor | None,
        ragged: RaggedRows | None,
        annealing_mask_SS: Tensor | None,
        flex: bool,
    ) -> AttentionInputs:
        """Compute the slots' rotary tables and attention masks, shared by all blocks.

        `positions_BL` are the slots' positions in their canvases or documents; None: their columns in the row. The
        other arguments are those of `forward`.
        """
        if ragged is not None:
            assert annealing_mask_SS is None, "one kernel attends within whole rows"
            return self._varlen_inputs(ragged)
        width = ids_BL.shape[1] if kv_cache is None else kv_cache.width
        # Rows with chunks may exceed the limit: they hold a canvas and states of its blocks.
        if states_BL is None:
            self._check_width(width)
        pattern = self.pattern(lengths_B, block_lengths_B)
        own_BL, queried_BQ = self._all_columns(ids_BL), queries_BQ
        if states_BL is not None:
            assert pattern is not None, "everyone sees everyone only where attention is bidirectional"
            assert columns_BL is not None, "a state's slots stand where its block does"
            assert lengths_B is None, "what fills a row is a chunk of its own"
            assert kv_cache is None, "a KV cache holds whole canvases"
            pattern = clean_and_noisy(pattern, states_BL, columns_BL)
        elif columns_BL is not None:
            own_BL, queried_BQ = columns_BL, columns_BL.gather(1, queries_BQ)
        if documents_BL is not None:
            assert lengths_B is None, "what fills a row is a document of its own"
            assert kv_cache is None, "a KV cache holds whole canvases"
            assert positions_BL is not None, "documents have places"
            pattern = within_documents(pattern, documents_BL, positions_BL)
        if annealing_mask_SS is not None:
            assert kv_cache is None, "cached keys and values are of open attention"
            pattern = annealed(pattern, annealing_mask_SS, positions_BL)
        return AttentionInputs(
            rope=self._rope(width, positions_BL, ids_BL.device),
            columns=columns_BL,
            mask=make_mask(pattern, own_BL, width, flex=flex),
            query_mask=make_mask(pattern, queried_BQ, width, flex=flex),
        )

    def _varlen_inputs(self, ragged: RaggedRows) -> AttentionInputs:
        """Compute `_attention_inputs` of concatenated rows."""
        assert self.pattern(None) is None, "within a row everyone sees everyone"
        self._check_width(ragged.tokens.longest)
        return AttentionInputs(
            rope=self._rope(ragged.tokens.longest, ragged.positions, ragged.positions.device),
            columns=None,
            mask=VarlenAttention(queries=ragged.tokens, keys=ragged.tokens),
            query_mask=VarlenAttention(queries=ragged.queries, keys=ragged.tokens),
        )

    def _check_width(self, width: int) -> None:
        if self.config.max_sequence_length < width:
            raise ValueError(
                f"a canvas of {width} tokens exceeds max_sequence_length {self.config.max_sequence_length}"
            )

    def _head_input(
        self, ids_BL: Tensor, inputs: AttentionInputs, queried: Queries, kv_cache: KVCache | None
    ) -> Tensor:
        """Compute the head's input [N, D]: the normalised residual stream of the scored slots after the last block."""
        x_BLD = self.embed(ids_BL)
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            of_layer = None if kv_cache is None else kv_cache.layer(index)
            x_BLD = block(x_BLD, inputs, queried if index == last else None, of_layer)
        return self.norm(x_BLD)

    def _rope(self, width: int, positions_BL: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        # One extra column: a KV cache puts discarded writes there.
        cos, sin = rope_tables(width if positions_BL is None else width + 1, self.config, device)
        if positions_BL is None:
            return cos, sin
        # Axis 1 broadcasts over the heads of q and k.
        return cos[positions_BL][:, None], sin[positions_BL][:, None]

    def _all_columns(self, ids_BL: Tensor) -> Tensor:
        return torch.arange(ids_BL.shape[1], device=ids_BL.device).expand(ids_BL.shape)

    def _logits(self, x_ND: Tensor) -> Tensor:
        if self.head is None:
            return F.linear(x_ND, self.embed.weight)
        # The layer and not its weight: a peft adapter may wrap it.
        logits: Tensor = self.head(x_ND)
        return logits

    @property
    def _head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Positions and attention masks of a batch's slots, shared by all blocks."""

    rope: tuple[Tensor, Tensor]
    """Cosines and sines, [L, E] or [B, 1, L, E]."""
    columns: Tensor | None
    """[B, L] columns of the slots in their canvases; None: 0, 1, 2, ..."""
    mask: AttentionMask
    """Attention mask of all slots."""
    query_mask: AttentionMask
    """Attention mask of the queried slots."""


class Queries:
    """Predicted slots: a grid [B, Q] of columns, of which those at `scored_N` (indices into B * Q) are scored."""

    def __init__(self, queries_BQ: Tensor, scored_N: Tensor) -> None:
        self._queries_BQ, self._scored_N = queries_BQ, scored_N

    def of_rows(self, x_BLD: Tensor) -> Tensor:
        """Gather the grid's slots: [B, L, D] to [B, Q, D]."""
        return x_BLD.gather(1, self._queries_BQ[:, :, None].expand(-1, -1, x_BLD.shape[-1]))

    def of_rope(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Gather the cosines and sines of the grid's slots, [B, 1, Q, E]."""
        if rope[0].ndim == 2:
            return rope[0][self._queries_BQ][:, None], rope[1][self._queries_BQ][:, None]
        return self.of_rows(rope[0][:, 0])[:, None], self.of_rows(rope[1][:, 0])[:, None]

    def scored(self, x_BQD: Tensor) -> Tensor:
        """Select the scored slots: [B, Q, D] to [N, D]."""
        return x_BQD.flatten(0, 1)[self._scored_N]


def init_weights(model: Transformer, seed: int, scale: float = 1.0) -> None:
    """Initialize a network's weights, determined by `seed` alone.

    Weights are normal with standard deviation scale / sqrt(fan-in); the matrices that write into the residual
    stream are divided by sqrt(2 * layers), so that its variance does not grow with depth (GPT-2, section 2.3).
    """
    generator = torch.Generator().manual_seed(seed)
    depth_scale = (2 * model.config.num_layers) ** -0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            # Fan-in is the last axis; experts have an extra axis before it.
            std = scale * weight.shape[-1] ** -0.5
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                std *= depth_scale
            weight.normal_(0.0, std, generator=generator)
