"""Import of peers' code by the peers benchmark, with stand-ins for their checkouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.peers import __main__ as command
from benchmarks.gpu.peers.checkouts import load_peers

TRAINER = """
from datasets import Dataset
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from accelerate.utils import set_seed
import wandb

class DiffuGRPOTrainer(GRPOTrainer):
    def __init__(self):
        raise AssertionError("the loop is not measured")

    @profiling_decorator
    def doubled(self, value):
        set_seed(0)
        return 2 * value
"""
SAMPLERS = """
from model.configuration_llada import LLaDAConfig
generate = generate_with_prefix_cache = generate_with_dual_cache = LLaDAModelLM = LLaDAConfig
"""


@pytest.fixture
def first_d1(tmp_path: Path) -> Path:
    directory = tmp_path / "d1"
    (directory / "diffu-grpo").mkdir(parents=True)
    (directory / "diffu-grpo" / "diffu_grpo_trainer.py").write_text(TRAINER)
    return directory


@pytest.fixture
def fast_dllm(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "fast-dllm"
    (directory / "llada" / "model").mkdir(parents=True)
    (directory / "llada" / "generate.py").write_text(SAMPLERS)
    (directory / "llada" / "model" / "configuration_llada.py").write_text("class LLaDAConfig: pass\n")
    yield directory
    for name in [name for name in sys.modules if name.partition(".")[0] == "model"]:
        del sys.modules[name]


def test_methods_of_the_trainer_run_without_its_training_loop(first_d1: Path, fast_dllm: Path) -> None:
    peers = load_peers(first_d1, fast_dllm)
    assert object.__new__(peers.first_trainer).doubled(21) == 42
    assert "trl" not in sys.modules
    assert list(peers.fast_dllm.samplers) == ["none", "prefix", "dual"]
    assert str(fast_dllm / "llada") not in sys.path


def test_a_package_that_is_installed_is_not_replaced(first_d1: Path, fast_dllm: Path) -> None:
    load_peers(first_d1, fast_dllm)
    accelerate = pytest.importorskip("accelerate.utils")
    assert accelerate.set_seed.__module__.startswith("accelerate")


def test_a_directory_that_is_no_checkout_is_named(
    first_d1: Path, fast_dllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["peers", "--d1", str(fast_dllm), "--fast-dllm", str(fast_dllm)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert f"error: {fast_dllm} is not a checkout of the first d1" in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"{first_d1} is not a checkout of Fast-dLLM"):
        load_peers(first_d1, first_d1)


def test_what_peers_need_is_named(first_d1: Path, fast_dllm: Path) -> None:
    path = fast_dllm / "llada" / "generate.py"
    path.write_text("import no_such_package\n" + SAMPLERS)
    with pytest.raises(ValueError, match="cannot be imported: No module named 'no_such_package'"):
        load_peers(first_d1, fast_dllm)
