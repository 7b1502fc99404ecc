"""The frozen autoregressive teacher of distillation: its distributions at slots of completed texts.

Shape letters: B rows of a rank, L completion slots, N terms.
"""

from __future__ import annotations

from pathlib import Path

import torch

from learner.batch import CompletionBatch, join_canvas
from learner.estimators import Terms, Views, token_hidden_states
from learner.flops import CanvasSums, forward_flops
from learner.model.adapter import read_chain
from learner.model.lora_config import FULL_FINE_TUNING
from learner.model.storage.weights import StoredWeights
from learner.model.targets import TeacherStates
from learner.objectives.distillation import DistillationConfig, causal_config
from learner.parallel.sharding import ShardedPolicy


class Teacher:
    """A frozen autoregressive model, sharded as the policy is."""

    def __init__(self, model: ShardedPolicy, objective: DistillationConfig) -> None:
        """Wrap a model with causal attention; `objective` defines the divergence from it."""
        self.model, self._objective = model, objective

    @classmethod
    def of_policy(cls, policy: ShardedPolicy, objective: DistillationConfig) -> Teacher:
        """Copy the current policy, without its adapter, as a model with causal attention."""
        model = policy.frozen_like(causal_config(policy.config))
        model.copy_weights_from(policy)
        return cls(model, objective)

    @classmethod
    def load(cls, directory: Path, policy: ShardedPolicy, objective: DistillationConfig) -> Teacher:
        """Load the teacher from a checkpoint, sharded as `policy` is; each rank reads its own rows.

        Raises ValueError if there is no checkpoint, it is an adapter, or its weights do not fit its config.
        """
        if read_chain(directory).adapter is not None:
            raise ValueError(f"{directory} is an adapter, and a teacher has weights of its own: take `d1 export` of it")
        weights = StoredWeights(directory)
        model = policy.frozen_like(causal_config(weights.config))
        model.load_full_weights(weights)
        return cls(model, objective)

    def states(self, terms: Terms, batch: CompletionBatch) -> TeacherStates:
        """Compute its hidden states at the slots of terms, conditioned on the completed text before. A collective.

        Args:
            terms: terms of rows of `batch`.
            batch: the rank's rows, on the CPU.
        """
        device = self.model.device
        views = completed_texts(terms, batch, self.model.config.pad_token_id)
        with self.model.without_gradients():
            head_input_ND = token_hidden_states(self.model.module, views, device)
        return TeacherStates(
            head_input=head_input_ND,
            weight=self.model.gathered_head().to(head_input_ND.dtype),
            reverse_kl=self._objective.reverse_kl,
            top_k=self._objective.top_k,
        )

    def flops(self, terms: Terms, batch: CompletionBatch) -> float:
        """Count the FLOP of its forward for some terms, one canvas per row."""
        config = self.model.config
        return forward_flops(
            config, FULL_FINE_TUNING, CanvasSums.of(completed_texts(terms, batch, config.pad_token_id))
        ).total


def completed_texts(terms: Terms, batch: CompletionBatch, pad_id: int) -> Views:
    """Return the unmasked texts of the terms' rows, each up to the last slot that is scored."""
    rows_B, place_N = terms.rows.cpu().unique(return_inverse=True)
    some = batch.select(rows_B)
    ids_BS, columns_BL = join_canvas(some, some.prompt_ids, some.completion_ids, pad_id)
    columns_N = columns_BL[place_N, terms.slots.cpu()]
    lengths_B = torch.zeros_like(rows_B).scatter_reduce_(0, place_N, columns_N + 1, "amax")
    ids_BS = ids_BS[:, : int(lengths_B.max())]
    slots_M, scored_N = (place_N * ids_BS.shape[1] + columns_N).unique(return_inverse=True)
    return Views(ids=ids_BS, lengths=lengths_B, slots=slots_M, scored=scored_N, targets=torch.zeros_like(scored_N))
