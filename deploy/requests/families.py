"""Requests to either policy family: masked diffusion, or renoising (DiffusionGemma)."""

from __future__ import annotations

from pathlib import Path

from deploy.requests.defaults import Defaults
from deploy.requests.renoising import RenoisingDefaults
from learner.model.checkpoint_files import generation_defaults, load_config
from learner.model.config import TransformerConfig
from learner.model.renoising.config import RenoisingConfig, is_renoising, read_renoising_config
from rollout.renoising.request import RenoisingRequest, check_renoising_request
from rollout.request import Request, SamplingParams, canvas_of, check_request

AnyRequest = Request | RenoisingRequest
AnyConfig = TransformerConfig | RenoisingConfig
AnyDefaults = Defaults | RenoisingDefaults


def defaults_of(checkpoint: Path, config: AnyConfig, evaluated: SamplingParams | None) -> AnyDefaults:
    """Return the default parameters of a checkpoint; `evaluated` are those of its run's evaluation, if it has a run.

    Raises ValueError if its `generation_config.json` is invalid.
    """
    if isinstance(config, RenoisingConfig):
        return RenoisingDefaults(config=config)
    if evaluated is not None:
        return Defaults.of_run(evaluated)
    return Defaults.of_policy(config.max_sequence_length, config.block_length, generation_defaults(checkpoint))


def read_config(directory: Path) -> AnyConfig:
    """Read the model config of a checkpoint of either family. Raises ValueError if it is not a checkpoint."""
    return read_renoising_config(directory) if is_renoising(directory) else load_config(directory)


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
