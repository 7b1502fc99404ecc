"""Startup of a learner worker, on a simulated GPU."""

from __future__ import annotations

import pytest
import torch

from actors.resources import GpuSection
from actors.run_config import ModelSection
from actors.spec import Phase, RunSpec
from actors.training.starting import load_sharded
from learner.model.checkpoint import load_policy
from learner.model.lora_config import LoraConfig
from tests.simulated.stand_in_gpu import DEVICE, stand_in_gpu


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4, alpha=8)], ids=["whole", "adapter"])
def test_a_learner_on_a_share_of_a_gpu_holds_its_policy_there(spec: RunSpec, lora: LoraConfig) -> None:
    changes = {"device": "cuda", "gpus": GpuSection(sampler=0.3, learner=0.4), "model": ModelSection(lora=lora)}
    on_gpu = spec.model_copy(update=changes)
    with stand_in_gpu():
        policy = load_sharded(on_gpu, spec.initial_checkpoint, Phase.UNTRAINED)
        assert {tensor.device for tensor in policy.tensors()} == {policy.device} == {DEVICE}
        found = policy.full_weights()
    for name, weight in load_policy(spec.initial_checkpoint).named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), msg=name)
