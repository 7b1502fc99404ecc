"""Fixtures of the command-line tests: a small recipe, the command itself, and the events of a run."""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

RECIPE = """\
task: {name: sums}
num_train_problems: 40
sft: {num_labels: 8, num_steps: 20, lr: 1e-3}
rollout:
  sampling: {gen_length: 32, block_length: 8, num_denoise_steps: 16}
learner: {num_rounds: 3, groups_per_round: 2, lr: 1e-4}
evaluation: {num_problems: 20}
"""

TRAINED_RECIPE = """\
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


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, with no cluster in the environment."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "D1_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe_file(workdir: Path) -> Path:
    path = workdir / "tiny.yaml"
    path.write_text(RECIPE)
    return path


class Ended:
    """Status, stdout and stderr of a command."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def assert_refused(self, *parts: str) -> None:
        """Assert one sentence on stderr with all of `parts`, status 2, nothing on stdout, no traceback."""
        assert self.status == 2, (self.out, self.err)
        assert self.err.startswith("d1: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        for part in parts:
            assert part in self.err


@pytest.fixture
def d1(workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run `d1 ...` in this process, through its entry point."""
    from deploy import wait_display
    from deploy.cli import main

    # On a busy machine, slow imports are reported on stderr, which is not part of a command's output.
    monkeypatch.setattr(wait_display, "EVERY_S", 600.0)
    # So that commands are printed with `d1` as the program.
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts"), prepend=os.pathsep)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["d1", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


Event = dict[str, Any]


class Recorder:
    """Builds events with a clock."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.time_s = 0.0

    def add(self, event: str, wait_s: float = 0.0, **values: Any) -> None:
        self.time_s += wait_s
        self.events.append({"event": event, "time_s": round(self.time_s, 3), **values})

    def evaluation(
        self,
        label: str,
        num_correct: int,
        round_index: int = 0,
        schedules: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        counts: dict[str, Any] = {"num_correct": num_correct, "num_problems": 500}
        if schedules:
            counts["schedule"] = next(iter(schedules))
            counts["schedules"] = {
                name: {"num_correct": right, "num_problems": 500, "mean_steps": steps}
                for name, (right, steps) in schedules.items()
            }
        self.add("evaluation", 10, label=label, policy_version=round_index + 1, round=round_index, **counts)

    def sft_steps(self, phase: str, num_steps: int, planned: int, **limit: float) -> None:
        self.add("phase", phase=phase, num_steps=planned, **limit)
        self.add("sft_eval", phase=phase, step=0, loss=5.0, loss_at_t=[4.0, 6.0])
        for step in range(10, num_steps + 1, 10):
            loss = 4 * math.exp(-step / 100) + 0.4
            self.add("sft", 2, phase=phase, step=step, loss=loss, grad_norm=1.0, lr=1e-3, tokens_per_s=5000.0)
        self.add("phase_end", phase=phase, seconds=num_steps / 5, num_steps=num_steps)
        self.add("sft_eval", phase=phase, step=num_steps, loss=1.5, loss_at_t=[1.0, 2.0])

    def round(self, index: int, reward: float) -> None:
        self.add(
            "round",
            4,
            round=index,
            policy_version=index + 2,
            reward=reward,
            reward_parts={"answer": 0.1, "correct": reward - 0.1},
            correct=reward - 0.1,
            num_completions=12,
            num_failed_groups=0,
            num_retries=0,
            pools={"samplers": {"size": 1, "away": 0, "busy": 0.5}, "graders": {"size": 1, "away": 0, "busy": 0.1}},
            mean_tokens=20.0,
            loss=-0.01,
            kl=0.001 * index,
            token_logp=-0.5,
            grad_norm=0.2,
            learning_rate=1e-4,
            frac_reward_zero_std=0.4,
            **{"clip_ratio/region_mean": 0.02},
            sampling_s=2.5,
            training_s=1.2,
            publish_s=0.1,
            tokens_per_s=600.0,
        )


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def events(recorder: Recorder) -> list[Event]:
    """A whole run: 12 rounds, an evaluation after every sixth, and a control for the same seconds as the rounds."""
    recorder.add("run", name="tiny", seed=0, commit="abc", hardware="2 cores", versions={})
    recorder.evaluation("untrained", 0)
    recorder.sft_steps("sft", 100, planned=100)
    recorder.evaluation("sft", 120)
    recorder.add("checkpoint", path="checkpoints/sft", phase="sft", round=0, policy_version=1)
    recorder.add("phase", phase="rl", num_steps=12)
    for index in range(12):
        recorder.round(index, 0.3 + 0.02 * index)
        if index == 5:
            recorder.evaluation("round", 180, 6)
    recorder.add("phase_end", phase="rl", seconds=45.6, num_steps=12)
    recorder.evaluation("rl", 250, 12)
    recorder.add("checkpoint", path="checkpoints/rl-000012", phase="rl", round=12, policy_version=13)
    recorder.sft_steps("control", 230, planned=0, limit_s=46.0, spent_s=0.0)
    recorder.evaluation("control", 140, 12)
    recorder.add("done", 1, seconds=recorder.time_s + 1)
    return recorder.events


@pytest.fixture
def make_run(workdir: Path) -> Callable[..., Path]:
    """Writes a run directory below `runs`."""

    def make(name: str, events: list[Event], samples: list[dict[str, Any]] | None = None) -> Path:
        directory = workdir / "runs" / name
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (directory / "recipe.yaml").write_text(f"name: {name}\n{RECIPE}")
        if samples is not None:
            (directory / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        return directory

    return make


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one, `tiny`, whose checkpoints `initial` and `rl-000003` are random policies."""
    import torch

    from learner.model.checkpoint import save_checkpoint
    from learner.model.tokenizer import ChatTokenizer, make_tokenizer
    from learner.model.transformer import Transformer, init_weights
    from tests.tiny_policy import config_of

    base = tmp_path_factory.mktemp("runs")
    make_tokenizer(["1 2 3 -> 1 3 6" * 5], base / "tokenizer", 320)
    tokenizer = ChatTokenizer(base / "tokenizer")
    config = config_of(tokenizer, max_sequence_length=64)
    run = base / "runs" / "tiny"
    for name, phase, index in (("initial", "untrained", 0), ("rl-000003", "rl", 3)):
        model = Transformer(config)
        init_weights(model, index)
        with torch.no_grad():
            model.head.weight.mul_(4.0)
        state = {"phase": phase, "round": index, "policy_version": index + 1, "rl_seconds": 0.0}
        save_checkpoint(run / "checkpoints" / name, config, model.state_dict(), base / "tokenizer", trainer_state=state)
    (run / "recipe.yaml").write_text(TRAINED_RECIPE)
    (run / "metrics.jsonl").write_text("")
    return base / "runs"
