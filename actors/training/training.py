"""Training run on one learner worker: the stages in order.

Every rank runs the same program on the same batches. Only rank 0 reads a clock or the list of checkpoints, and talks to
the rest of the run; it broadcasts the results (`learner/parallel/consensus.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from actors.spec import Phase, RunSpec
from actors.training.context import Client, RunContext
from actors.training.limits import Pulse, StopRequestedError
from actors.training.rounds import run_rounds
from actors.training.sft.stage import run_control, run_sft
from learner.parallel.consensus import Ranks


class TrainingRun:
    """Training run of one rank, through all stages."""

    def __init__(
        self, spec: RunSpec, client: Client, pulse: Pulse, ranks: Ranks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load the newest checkpoint of the run directory, which is the initial one in a fresh run."""
        torch.set_num_threads(1)
        self._context = RunContext(spec, client, pulse, ranks, clock)

    def run(self) -> None:
        """Run the stages that were requested and that the checkpoint has not completed, unless a stop is requested."""
        context = self._context
        where, position = context.found.directory.name, asdict(context.position)
        context.ranks.on_rank_0(lambda: context.client.learner_started(where, position))
        context.record_loading()
        for what in context.found.skipped:
            context.record("failure", what=what, attempt=1)
        try:
            self._stages()
        except StopRequestedError:
            self._stop()
        except Exception:
            # The next group may resume from the checkpoint that is being written.
            context.checkpointer.wait()
            raise

    def _stages(self) -> None:
        context, phases = self._context, self._context.spec.phases
        if not context.position.is_published and context.position.phase not in phases:
            raise ValueError(
                f"the run was stopped during {context.position.phase}, which this command does not run; resume "
                "it with the command that started it"
            )
        if context.position.is_published:
            # Samplers and service may be new, so the store must have the version that they will request.
            context.publish(self._digest_override())
            if context.evaluator.is_due(context.position):
                context.evaluate(is_new=False)
        if Phase.SFT in phases and (context.position.phase is Phase.UNTRAINED or context.resumes(Phase.SFT)):
            run_sft(context)
        if Phase.RL in phases and context.position.round < context.spec.learner.num_rounds:
            run_rounds(context)
        if Phase.CONTROL in phases and (context.position.phase is not Phase.CONTROL or context.resumes(Phase.CONTROL)):
            run_control(context)

    def _digest_override(self) -> str | None:
        """Return the digest of the checkpoint's policy; None for an initial policy in 4 bits, which is rounded, unlike
        its file."""
        position = self._context.position
        is_rounded = position.phase is Phase.UNTRAINED and self._context.spec.model.lora.base_weights == "nf4"
        return None if is_rounded else position.manifest_digest

    def _stop(self) -> None:
        """Save the progress of the current stage."""
        context = self._context
        context.pulse.doing = "stopping"
        context.checkpointer.collect_pending()
        known, background = (context.found.position, context.checkpointer.newest), context.evaluator.background
        if background is not None and background.position in known:
            # A run that resumed after the round since would lack this evaluation, so that round is repeated.
            context.position = background.position
        elif context.learner is not None and context.position not in known:
            context.save()
            context.checkpointer.collect_pending()
        position = context.position
        if context.ranks.rank == 0:
            context.client.stopped({"phase": position.phase, "round": position.round, "step": position.step})
