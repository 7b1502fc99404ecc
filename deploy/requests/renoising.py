"""Default parameters and key checks for policies without a mask token (DiffusionGemma)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.requests.parameters import RENOISING_KEYS, Values
from learner.model.renoising.config import MODEL_TYPE, RenoisingConfig
from rollout.field_error import FieldError
from rollout.renoising.request import RenoisingParams

# Values of other policies' parameters that disable them.
_NOTHING = {"top_p": 1, "top_k": 0, "cfg_scale": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class RenoisingDefaults:
    """Default sampling parameters of this family: those of the original code."""

    config: RenoisingConfig
    """Model config of the policy."""

    def complete(self, layers: Sequence[Values], num_prompt_tokens: int) -> dict[str, Any]:
        """Complete the values of a request with the defaults. Later layers override earlier ones.

        Raises FieldError for a key that this family does not support.
        """
        given = {key: value for layer in layers for key, value in layer.items()}
        for key in [key for key, value in given.items() if value == _NOTHING.get(key)]:
            del given[key]
        block = given.pop("block_length", self.config.canvas_length)
        if block != self.config.canvas_length:
            raise FieldError(
                f"{{block_length}} {block} is not the {self.config.canvas_length} slots of this policy's canvases; "
                "leave it out"
            )
        check_keys(given, RENOISING_KEYS)
        return {"gen_length": self._fitting_length(num_prompt_tokens)} | given

    def _fitting_length(self, num_prompt_tokens: int) -> int:
        """Return the default length, cut to the whole canvases that fit; one canvas if none fits."""
        num_slots = self.config.canvas_length
        room = (self.config.max_sequence_length - num_prompt_tokens) // num_slots * num_slots
        return min(RenoisingParams().gen_length, room) if room > 0 else num_slots


def check_keys(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise FieldError for a key that is not among the `known` keys of this family."""
    for key in given:
        if key not in known:
            taken = ", ".join(f"{{{name}}}" for name in known)
            raise FieldError(f"{{{key}}} is not for {MODEL_TYPE} policies; they take {taken}")
