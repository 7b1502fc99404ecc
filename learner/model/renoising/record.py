"""What a sampler did on one canvas: all that its likelihood is of.

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
    """[N, C] the canvas that each step saw: random ids at first, then what was accepted, and random ids elsewhere."""
    drawn: NDArray[np.int32]
    """[N, C] the token that each step drew at every slot."""
    drawn_logp: NDArray[np.float32]
    """[N, C] its log-probability, in nats, under the step's tempered law."""
    accepted: NDArray[np.bool_]
    """[N, C] whether it was kept for the next step."""
    argmax: NDArray[np.int32]
    """[N, C] the most probable token."""
    mean_entropy: NDArray[np.float32]
    """[N] entropy of the tempered law, in nats, mean over the slots."""
    temperatures: NDArray[np.float32]
    """[N]."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[C] what the canvas ends as: the last step's most probable tokens. They were never drawn, and have no
        log-probability."""
        return self.argmax[-1]

    @property
    def num_steps(self) -> int:
        """N."""
        return len(self.argmax)
