"""The control on one learner worker: what the seconds of the rounds would have given if they had gone into more SFT."""

from __future__ import annotations

from actors.checkpoints.selection import Position
from actors.spec import Phase
from actors.training.context import RunContext
from actors.training.ending import Limit
from actors.training.sft import SftSteps, labels


def run_control(context: RunContext) -> None:
    """More SFT on the same labels from where the rounds began, for the seconds that they took or for given steps."""
    spec, rounds = context.spec, context.position
    if not context.resumes(Phase.CONTROL):
        context.policy.load_full_weights(context.start_weights(Phase.CONTROL))
    limit = Limit(num_steps=spec.control.num_steps, seconds=0.0 if spec.control.num_steps else rounds.rl_seconds)
    # Its steps go on counting where SFT's ended: other orders of the labels, other masks.
    SftSteps(context, labels(context), Phase.CONTROL, limit, spec.sft.num_steps).run()
    context.finish(
        Position(
            phase=Phase.CONTROL,
            round=rounds.round,
            policy_version=rounds.policy_version + 1,
            rl_seconds=rounds.rl_seconds,
        )
    )
