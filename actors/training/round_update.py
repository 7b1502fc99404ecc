"""Policy update of one round: measured, and skipped if its loss or gradient is not finite."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from actors.run_log import FAILED_BATCHES
from actors.training.context import LAG_TIMEOUT_S, RunContext
from actors.training.limits import catching_gpu_oom
from learner.batch import RolloutBatch
from learner.hardware import peak_flop_per_s, peak_memory_bytes, reset_peak_memory
from learner.learner import Learner

_NOTHING = {"num_trained_completions": 0.0}


class RoundUpdate:
    """Updater of the policy, round by round."""

    def __init__(self, context: RunContext, learner: Learner) -> None:
        self._context, self._learner = context, learner
        self._num_skipped = 0

    def run(self, batch: RolloutBatch | None, round_index: int) -> dict[str, float]:
        """Update on a round's batch and return the metrics; without a batch, or if it is skipped, those of no training.

        Raises:
            FloatingPointError: too many rounds in a row had no finite loss.
            OutOfGpuMemoryError: this rank's GPU lacks the memory for its micro-batches.
        """
        metrics = _NOTHING if batch is None else self._updated(batch, round_index)
        self._learner.sync_reference(round_index)
        return metrics

    def _updated(self, batch: RolloutBatch, round_index: int) -> dict[str, float]:
        context = self._context
        context.policy.barrier(f"round {round_index}", LAG_TIMEOUT_S)
        reset_peak_memory(context.policy.device)
        began = context.clock()
        try:
            with catching_gpu_oom("learner", f"round {round_index}", context.ranks.rank):
                metrics = self._learner.update(batch, round_index)
        except FloatingPointError as error:
            self._skip(batch, round_index, error)
            return _NOTHING
        self._num_skipped = 0
        return metrics | self._use_of_devices(self._learner.model_flops / (context.clock() - began))

    def _skip(self, batch: RolloutBatch, round_index: int, error: FloatingPointError) -> None:
        """Save a batch that is skipped. Raises FloatingPointError after too many such rounds in a row."""
        path = self._context.spec.run_dir / FAILED_BATCHES / f"round-{round_index:06d}.safetensors"
        if self._context.ranks.rank == 0:
            _keep(batch, path)
        self._num_skipped += 1
        if self._num_skipped > self._context.spec.learner.max_skipped_rounds:
            raise FloatingPointError(f"round {round_index}: {error}. Its batch is in {path}") from error
        what = f"round {round_index} is skipped: {error}. Its batch is in {path}"
        self._context.record("failure", what=what, attempt=1)

    def _use_of_devices(self, flop_per_s: float) -> dict[str, float]:
        """Return the device utilization of an update: FLOP/s of all workers, and the largest memory peak among them."""
        policy = self._context.policy
        memory = policy.max_over_ranks(torch.tensor([peak_memory_bytes(policy.device)])).item()
        used = {"flop_per_s": flop_per_s, "peak_memory_bytes": int(memory)}
        peak = peak_flop_per_s(policy.device)
        return used if peak is None else used | {"mfu": flop_per_s / (peak * policy.world_size)}


def _keep(batch: RolloutBatch, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file(batch.given(), path)
