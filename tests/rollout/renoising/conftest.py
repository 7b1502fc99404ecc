from __future__ import annotations

from pathlib import Path

import pytest

from learner.model.renoising.policy import RenoisingPolicy, load_renoising_policy
from tests.tiny_renoising import make_renoising_checkpoint


@pytest.fixture(scope="session")
def renoising_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_renoising_checkpoint(tmp_path_factory.mktemp("renoising"))


@pytest.fixture(scope="session")
def renoising_policy(renoising_checkpoint: Path) -> RenoisingPolicy:
    return load_renoising_policy(renoising_checkpoint)
