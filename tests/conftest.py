"""Shared fixtures: a tiny random policy, reference data and a Ray cluster."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights

# No deadline: on a busy machine an example of a millisecond takes half a second.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

SHARED = Path(__file__).parents[1].parent / "shared"

# Repeated garbage collection over long-lived imports and test items takes a seventh of the suite's time.
gc.disable()
# Otherwise every Ray of the tests prestarts two idle workers, which costs a second of CPU.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


_RUNS, _RAY = "test_end_to_end", ("test_end_to_end", "test_on_ray", "test_pin_on_ray", "test_cluster_on_ray")


class _OneRayAtATime(LoadFileScheduling):
    """Give each worker whole files, and one worker all files that mainly test Ray clusters.

    Starting several clusters at once on two cores exceeds Ray's own start-up timeouts on a slow machine.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if Path(file).stem in _RAY else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Replace the scheduler of `pytest --dist`."""
    return _OneRayAtATime(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order end-to-end runs first, then the other tests that start a Ray cluster, since both take longest, and then the
    other files of this folder, which take longer than most. xdist hands out whole files in this order."""
    here = Path(__file__).parent
    items.sort(key=lambda item: (item.path.stem != _RUNS, item.path.stem not in _RAY, item.path.parent != here))


def pytest_collection_finish() -> None:
    """Exclude everything collected so far from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference data next to the checkout. Tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the reference data in {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def config() -> TransformerConfig:
    return TransformerConfig(
        vocab_size=40,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        mlp_hidden_size=48,
        max_sequence_length=64,
        mask_token_id=38,
        eos_token_id=39,
        pad_token_id=39,
    )


@pytest.fixture(scope="session")
def moe_config(config: TransformerConfig) -> TransformerConfig:
    """A config of LLaDA2: its first block is dense, its second a mixture of experts with expert groups."""
    moe = {"num_experts": 8, "experts_per_token": 3, "expert_width": 16, "router": "sigmoid", "num_groups": 4}
    moe |= {"kept_groups": 2, "scale": 2.5, "shared_width": 32, "dense_layers": (0,)}
    family = {"family": "llada2_moe", "block_length": 4, "qk_norm": True, "head_width": 12, "rotary_width": 6}
    return TransformerConfig(**config.model_dump() | family | {"moe": moe})


@pytest.fixture
def policy(config: TransformerConfig) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed=0)
    with torch.no_grad():
        # Random networks are almost uniform; sharper logits make the commit order and the samples depend on the policy.
        model.head.weight.mul_(4.0)
    return model


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Start a Ray cluster on this machine that outlives the runs on it; yield the environment variables to reach it."""
    # Imported here because the tests of a GPU also run where Ray is not installed.
    import ray

    from deploy.ray_session import MAX_STARTS, connect_with_retries
    from tests.ray_processes import shut_down_ray

    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.pop("RAY_ADDRESS", None)
    start = partial(
        ray.init,
        address="local",
        namespace="d1",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
    )
    connect_with_retries(start, MAX_STARTS)
    yield dict(os.environ) | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    shut_down_ray()
    os.environ.clear()
    os.environ.update(before)
