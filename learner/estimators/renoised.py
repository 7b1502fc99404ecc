"""Exact likelihood of a renoising sampler's trajectory (DiffusionGemma): one decoder pass per step.

Slots are accepted by their entropies, before sampling. So the trajectory's log-probability is the sum over steps of the
accepted tokens' log-probabilities under the step's tempered distribution. A step is conditioned on the logits of the
previous one: no pass can score several steps, and a gradient holds all steps of a canvas in memory. Finished canvases
are encoded once. A completion costs as much as sampling it, and three times as much with gradients.

Shape letters: N denoise steps of a canvas, C slots of one, E accepted tokens.
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
    """Compute the log-probabilities [E] float32, in nats, of all accepted tokens, ordered by canvas, step and slot.

    Args:
        policy: the policy that scores them; it need not be the one that sampled them.
        prompt_ids: the prompt of the first canvas.
        canvases: the sampler's record.
    """
    device = policy.device
    prefix, behind = policy.prefix(), torch.tensor(list(prompt_ids), device=device)
    found = []
    for canvas in canvases:
        policy.append(prefix, behind)
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
