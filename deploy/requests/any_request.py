"""A request to a policy of any family: masked slots that are filled in, or canvases that are renoised."""

from __future__ import annotations

from learner.model.config import TransformerConfig
from learner.model.renoising.config import RenoisingConfig
from rollout.renoising.request import RenoisingRequest, check_renoising_request
from rollout.request import Request, canvas_of, check_request

AnyRequest = Request | RenoisingRequest
AnyConfig = TransformerConfig | RenoisingConfig


def check_any_request(request: AnyRequest, config: AnyConfig) -> None:
    """Raise FieldError, naming the field, when the policy cannot serve this request; ValueError where it is one to a
    policy of another kind."""
    if isinstance(request, Request) and isinstance(config, TransformerConfig):
        check_request(request, config)
    elif isinstance(request, RenoisingRequest) and isinstance(config, RenoisingConfig):
        check_renoising_request(request, config)
    else:
        raise ValueError(f"a {type(request).__name__} is not for the policy here")


def block_length_of(request: AnyRequest, config: AnyConfig) -> int:
    """Slots of a request's completion that are finished together: a block's, or a canvas'."""
    if isinstance(request, RenoisingRequest):
        assert isinstance(config, RenoisingConfig), "it was made for this policy"
        return config.canvas_length
    return request.params.block_length


def num_slots_of(request: AnyRequest, config: AnyConfig) -> int:
    """Slots of a request's completion, those of a last block or canvas beyond it included."""
    if isinstance(request, RenoisingRequest):
        return request.num_slots(block_length_of(request, config))
    assert isinstance(config, TransformerConfig), "it was made for this policy"
    return canvas_of(request, config).num_slots
