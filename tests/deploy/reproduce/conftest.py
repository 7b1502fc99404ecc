"""A reproduction as small as can be."""

from __future__ import annotations

from pathlib import Path

import pytest

SCALE = """\
about: As small as can be.
seeds: [0, 1]
pretraining: {num_texts: 40, num_steps: 3}
recipe:
  model: {d_model: 32, num_layers: 1, num_heads: 2, mlp_hidden_size: 48}
  num_train_problems: 60
  sft: {num_labels: 20, num_steps: 3, batch_size: 8, lr: 0.001}
  rollout:
    num_samplers: 1
    batch_size: 16
    max_prompt_tokens: 20
    sampling: {gen_length: 20, block_length: 20, num_denoise_steps: 2}
  learner:
    num_rounds: 2
    groups_per_round: 4
    group_size: 4
    estimator: {name: trajectory, steps_per_segment: 1, law: sampler}
    objective: {name: clipped_ratio, old: sampler}
  evaluation: {num_problems: 12}
  control: {enabled: false}
algorithms:
  diffu-grpo: {inner_updates: 3}
tasks:
  sudoku:
    lengths: [18, 24]
    num_problems: 12
    task: {name: sudoku, prompt: compact}
"""


@pytest.fixture
def scale_file(tmp_path: Path) -> Path:
    path = tmp_path / "micro.yaml"
    path.write_text(SCALE)
    return path
