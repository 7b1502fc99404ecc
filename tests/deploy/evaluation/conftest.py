"""A run with a tiny random policy, and `d1 eval` in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from deploy.evaluation.pool import Wanted
from deploy.evaluation.problems import Batch
from deploy.evaluation.worker import Answered, Worker, WorkerConfig
from learner.model.checkpoint import save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.tokenizer import EOS, MASK, ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, init_weights

RECIPE = """\
name: tiny
task: {name: sums}
num_train_problems: 40
sft: {num_labels: 8, num_steps: 20, lr: 1e-3}
rollout:
  batch_size: 8
  sampling: {gen_length: 8, block_length: 8, num_denoise_steps: 4, temperature: 0.7}
learner: {num_rounds: 3, groups_per_round: 2, lr: 1e-4}
evaluation:
  num_problems: 20
  schedules: [{num_denoise_steps: 4}, {threshold: 0.9}]
"""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one, `tiny`, and its checkpoint `rl-000003`."""
    base = tmp_path_factory.mktemp("evaluation")
    make_tokenizer(["1 2 3 -> 1 3 6" * 5], base / "tokenizer", 320)
    tokenizer = ChatTokenizer(base / "tokenizer")
    eos = tokenizer.token_id(EOS)
    config = TransformerConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        mlp_hidden_size=48,
        max_sequence_length=64,
        mask_token_id=tokenizer.token_id(MASK),
        eos_token_id=eos,
        pad_token_id=eos,
    )
    model = Transformer(config)
    init_weights(model, 0)
    with torch.no_grad():
        model.head.weight.mul_(4.0)
    state = {"phase": "rl", "round": 3, "policy_version": 4, "rl_seconds": 0.0}
    run = base / "runs" / "tiny"
    save_checkpoint(
        run / "checkpoints" / "rl-000003", config, model.state_dict(), base / "tokenizer", trainer_state=state
    )
    (run / "recipe.yaml").write_text(RECIPE)
    (run / "metrics.jsonl").write_text("")
    return base / "runs"


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """One worker in this process in place of a pool; the batches that it was asked, as they come."""
    asked: list[Batch] = []

    def answers(config: WorkerConfig, _: Wanted, batches: Sequence[Batch]) -> Iterator[Answered]:
        worker = Worker(config)
        for batch in batches:
            asked.append(batch)
            yield worker.answer(batch)

    monkeypatch.setattr("deploy.evaluation.evaluate.answers", answers)
    return asked


@pytest.fixture
def evaluate(d1: Callable, runs: Path, workdir: Path) -> Callable:
    """`d1 eval tiny ...`, with answers below `workdir`."""

    def run(*words: str) -> object:
        return d1("eval", "tiny", "--runs-dir", str(runs), "--out", str(workdir / "out"), *words)

    return run
