"""Record of all denoise steps on one canvas, from which its likelihood is computed (DiffusionGemma).

Shape letters: C slots of the canvas, N denoise steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenoisedCanvas:
    """The steps of one canvas."""

    seen: NDArray[np.int32]
    """[N, C] input canvas of each step: random ids at first, later accepted tokens and random ids elsewhere."""
    drawn: NDArray[np.int32]
    """[N, C] the token that each step sampled at every slot."""
    drawn_logp: NDArray[np.float32]
    """[N, C] log-probability of the sampled token, in nats, under the step's tempered distribution."""
    accepted: NDArray[np.bool_]
    """[N, C] whether the sampled token was kept for the next step."""
    argmax: NDArray[np.int32]
    """[N, C] the most probable token."""
    mean_entropy: NDArray[np.float32]
    """[N] entropy of the tempered distribution, in nats, mean over the slots."""
    temperatures: NDArray[np.float32]
    """[N] temperature of each step."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[C] the final tokens: the last step's most probable ones. Not being sampled, they have no log-probability."""
        return self.argmax[-1]

    @property
    def num_steps(self) -> int:
        """N."""
        return len(self.argmax)
