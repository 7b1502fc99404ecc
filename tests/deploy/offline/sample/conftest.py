"""Fixtures: tiny checkpoints, and `d1 sample` of a file of requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, init_weights
from tests.tiny_policy import config_of

RECIPE = """\
name: tiny
task: {name: sums}
sft: {num_labels: 8, num_steps: 20, lr: 1e-3}
rollout:
  sampling: {gen_length: 24, block_length: 8, num_denoise_steps: 6, temperature: 0.7}
learner: {num_rounds: 3, groups_per_round: 2, lr: 1e-4}
"""
STATE = {"phase": "rl", "round": 3, "policy_version": 7, "rl_seconds": 0.0}


def _save(directory: Path, config: TransformerConfig, tokenizer: Path, seed: int = 0) -> None:
    model = Transformer(config)
    init_weights(model, seed)
    with torch.no_grad():
        model.head.weight.mul_(4.0)
    save_checkpoint(directory, config, model.state_dict(), tokenizer, trainer_state=STATE)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`with`: a tiny policy with a tokenizer, in a run. `bare`: one without either."""
    base = tmp_path_factory.mktemp("sample")
    make_tokenizer(["What is 2 + 3? The answer is five."] * 5, base / "tokenizer", 320)
    tokenizer = ChatTokenizer(base / "tokenizer")
    config = config_of(tokenizer, max_sequence_length=96)
    _save(base / "with", config, base / "tokenizer")
    _save(base / "bare", config, base / "none")
    _save(base / "run" / "checkpoints" / "rl", config, base / "tokenizer")
    (base / "run" / "recipe.yaml").write_text(RECIPE)
    (base / "run" / "metrics.jsonl").write_text("")
    (base / "bare" / "trainer_state.json").unlink()
    return base


@dataclass
class Answers:
    """Printed lines, stderr and status of a command with `--json`."""

    lines: list[dict[str, Any]]
    err: str
    status: int


@pytest.fixture
def ask(d1: Callable, checkpoints: Path, workdir: Path) -> Callable[..., Answers]:
    """`d1 sample CHECKPOINT --requests FILE --json`. A request that is a string is written as a raw line."""

    def run(requests: list[Any], *words: str, checkpoint: str = "with") -> Answers:
        lines = [request if isinstance(request, str) else json.dumps(request) for request in requests]
        (workdir / "requests.jsonl").write_text("\n".join(lines) + "\n")
        ended = d1("sample", str(checkpoints / checkpoint), "--requests", "requests.jsonl", "--json", *words)
        return Answers([json.loads(line) for line in ended.out.splitlines()], ended.err, ended.status)

    return run


@pytest.fixture
def stop_soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make one of the tiny policy's own tokens its end of text, so that texts end early. Returns its id."""

    def stop(token: int) -> None:
        def config(directory: Path) -> TransformerConfig:
            return load_config(directory).model_copy(update={"eos_token_id": token})

        def load(directory: Path, dtype: torch.dtype, *place: Any) -> Transformer:
            policy = load_policy(directory, dtype)
            object.__setattr__(policy, "config", config(directory))
            return policy

        monkeypatch.setattr("deploy.offline.policy.load_policy", load)
        monkeypatch.setattr("deploy.requests.families.load_config", config)

    return stop  # type: ignore[return-value]
