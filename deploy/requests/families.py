"""Requests to either policy family: masked diffusion, or renoising (DiffusionGemma)."""

from __future__ import annotations

from learner.model.config import TransformerConfig
from learner.model.renoising.config import RenoisingConfig
from rollout.renoising.request import RenoisingRequest, check_renoising_request
from rollout.request import Request, canvas_of, check_request

AnyRequest = Request | RenoisingRequest
AnyConfig = TransformerConfig | RenoisingConfig


def check_any_request(request: AnyRequest, config: AnyConfig) -> None:
    """Check that the policy can serve a request.

    Raises FieldError, naming the field, if it cannot, and ValueError if the request is for the other policy family.
    """
    if isinstance(request, Request) and isinstance(config, TransformerConfig):
        check_request(request, config)
    elif isinstance(request, RenoisingRequest) and isinstance(config, RenoisingConfig):
        check_renoising_request(request, config)
    else:
        raise ValueError(f"a {type(request).__name__} is not for the policy here")


def block_length_of(request: AnyRequest, config: AnyConfig) -> int:
    """Return the number of slots that finish together: those of a block, or of a canvas."""
    if isinstance(request, RenoisingRequest):
        assert isinstance(config, RenoisingConfig), "it was made for this policy"
        return config.canvas_length
    return request.params.block_length


def num_slots_of(request: AnyRequest, config: AnyConfig) -> int:
    """Return the completion slots of a request, including the surplus of its last block or canvas."""
    if isinstance(request, RenoisingRequest):
        return request.num_slots(block_length_of(request, config))
    assert isinstance(config, TransformerConfig), "it was made for this policy"
    return canvas_of(request, config).num_slots
