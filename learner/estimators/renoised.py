"""The exact likelihood of what a renoising sampler kept (DiffusionGemma): a pass of the decoder for every step.

Slots are kept by their entropies, before the draw, so the log-probability of the trajectory is the sum, over steps, of
those of the kept draws under the step's tempered law. A step is conditioned on the logits of the one before, so the
steps of a canvas are a chain: there is no pass that scores several at once, and a gradient holds all steps of a canvas
in memory. What is finished is encoded once. The cost of a completion is that of sampling it, three times with gradient.

Shape letters: N denoise steps of a canvas, C slots of one, E kept draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

    from learner.model.renoising.policy import RenoisingPolicy
    from learner.model.renoising.record import DenoisedCanvas


def kept_logps(policy: RenoisingPolicy, prompt_ids: Sequence[int], canvases: Sequence[DenoisedCanvas]) -> Tensor:
    """[E] float32 the log-probabilities, in nats, of all kept draws, in the order of canvases, steps and slots.

    Args:
        policy: the policy that sampled them, or another one: then these are the other one's.
        prompt_ids: what the first canvas stands behind.
        canvases: the record, as the sampler left it.
    """
    device = policy.device
    prefix, behind = policy.prefix(), torch.tensor(list(prompt_ids), device=device)
    found = []
    for canvas in canvases:
        policy.finish(prefix, behind)
        seen_NC, drawn_NC, accepted_NC = (
            torch.from_numpy(array).to(device) for array in (canvas.seen, canvas.drawn, canvas.accepted)
        )
        conditioning = None
        for step, temperature in enumerate(canvas.temperatures.tolist()):
            conditioning = policy(prefix, seen_NC[step].long(), conditioning) / temperature
            logp_C = conditioning.log_softmax(dim=-1).gather(1, drawn_NC[step].long()[:, None])[:, 0]
            found.append(logp_C[accepted_NC[step]])
        behind = torch.from_numpy(canvas.token_ids).to(device).long()
    return torch.cat(found)
