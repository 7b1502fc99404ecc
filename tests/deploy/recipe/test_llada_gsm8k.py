"""`recipes/llada-gsm8k.yaml` is the first d1's run, except where docs/d1_defects.md says otherwise."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.models import LLADA_8B
from deploy import machine
from deploy.capacity.available import cluster_resources
from deploy.job.preflight import preflight
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.run_directory import check_creatable, make_spec
from learner.model.checkpoint_files import CONFIG
from learner.model.config import TransformerConfig
from learner.model.families.llada import write_config
from learner.model.tokenizer import make_tokenizer

ROOT = Path(__file__).parents[3]
PATH = ROOT / "recipes" / "llada-gsm8k.yaml"

NOT_OURS = object()
"""Sentinel for what no value of our field expresses."""

# dllm-reasoning/d1 at 837888f. The rounds: `diffu-grpo/slurm_scripts/train.yaml` and `gsm_base.sbatch`, and their
# defaults in `diffu_grpo_config.py`, `diffu_grpo_train.py` and `diffu_grpo_trainer.py`.
ROUNDS: dict[str, object] = {
    "seed": 42,
    "task.name": "gsm8k",
    "task.prompt": "d1",
    "task.reward": "d1",
    "num_train_problems": 7473,
    "model.checkpoint": "GSAI-ML/LLaDA-8B-Instruct",
    "model.lora.rank": 128,
    "model.lora.alpha": 64,
    # The names in its list that LLaDA's blocks have.
    "model.lora.targets": ["q_proj", "k_proj", "v_proj", "up_proj"],
    "model.lora.base_weights": "nf4",
    "rollout.engine.dtype": "bfloat16",
    "rollout.max_oversampling": 1.0,
    "rollout.curriculum": 1,
    "rollout.schedules": None,
    "rollout.max_prompt_tokens": 200,
    "rollout.overlong_prompts": "truncate_left",
    "rollout.sampling.gen_length": 256,
    "rollout.sampling.block_length": 32,
    "rollout.sampling.num_denoise_steps": 128,
    "rollout.sampling.temperature": 0.9,
    # remasking: low_confidence, among tokens that are sampled first.
    "rollout.sampling.schedule": "quota",
    "rollout.sampling.drawing": "sample_then_select",
    "rollout.sampling.cfg_scale": 0.0,
    # It sets top_p and top_k, but its sampler ignores them.
    "rollout.sampling.top_p": 1.0,
    "rollout.sampling.top_k": 0,
    "rollout.sampling.cache": "none",
    # 10 epochs of 7473 // 16 rounds.
    "learner.num_rounds": 10 * (7473 // 16),
    # 8 GPUs, 2 steps of accumulation, 6 completions, all of one problem.
    "learner.groups_per_round": 8 * 2 * 6 // 6,
    "learner.group_size": 6,
    "learner.inner_updates": 12,
    "learner.num_minibatches": 1,
    "learner.lr": 3e-6,
    "learner.final_lr_fraction": 1.0,
    "learner.num_warmup_rounds": NOT_OURS,
    "learner.betas": [0.9, 0.99],
    "learner.weight_decay": 0.1,
    "learner.max_grad_norm": 0.2,
    "learner.max_staleness": 0,
    "learner.advantage": "group_mean",
    "learner.filters.zero_variance": False,
    "learner.estimator.name": "one_step",
    "learner.estimator.p_mask_prompt": 0.15,
    "learner.estimator.prompt_mask": "micro_step",
    "learner.objective.name": "clipped_ratio",
    "learner.objective.level": "token",
    "learner.objective.clip_low": 0.5,
    "learner.objective.clip_high": 0.5,
    "learner.objective.old": "learner",
    "learner.objective.kl": "k3",
    "learner.objective.kl_against": "reference",
    "learner.objective.kl_coef": 0.04,
    "learner.objective.nll_coef": 0.0,
    "learner.objective.normalize_by": "group",
    "learner.imitation_coef": 0.0,
    # It asks for a sync every 64 steps, and has no reference model to sync.
    "learner.reference_sync_rounds": 0,
    "sharding.compute_dtype": "bfloat16",
    "evaluation.every_rounds": NOT_OURS,
    "checkpoint_every_rounds": NOT_OURS,
    "control.enabled": False,
}
# `SFT/sft_train.py` and `SFT/ddp_config.yaml`, on the 1,000 rows of s1K.
SFT: dict[str, object] = {
    "sft.num_labels": None,
    # 4 GPUs, 4 steps of accumulation. An epoch of 990 rows has 62 steps on 4 GPUs.
    "sft.batch_size": 4 * 4 * 1,
    "sft.num_steps": 20 * 62,
    "sft.max_tokens": 4096,
    "sft.overlong": "truncate",
    "sft.eos_padding": "trained",
    "sft.packing": False,
    "sft.num_eval": 10,
    "sft.eval_every_steps": 100,
    "sft.normalize_by": "row",
    "sft.lora_alpha": 256,
    "sft.lr": 1e-5,
    "sft.num_warmup_steps": 0,
    "sft.betas": [0.9, 0.999],
    "sft.weight_decay": 0.1,
    "sft.max_grad_norm": 1.0,
}
FIRST_D1 = ROUNDS | SFT


def _line(begin: str) -> list[str]:
    """Return the overrides in the recipe's header line that starts with `begin`."""
    (line,) = [line for line in PATH.read_text(encoding="utf-8").splitlines() if line.startswith(begin)]
    return shlex.split(line.partition(": ")[2].rstrip("."))


def _with_sft(*overrides: str) -> Recipe:
    return load_recipe(PATH, [*_line("# To start with the first d1's SFT"), *overrides])


def _at(values: Mapping[str, Any], field: str) -> Any:
    for name in field.split("."):
        values = values[name]
    return values


def _table() -> dict[str, str]:
    """Return what the page says of the recipe, by field. Rows without a field are for human readers."""
    page = (ROOT / "docs" / "d1_defects.md").read_text(encoding="utf-8")
    rows = page.partition("## The recipe of its GSM8K run")[2].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")][1:]
    assert len(cells) > 10
    assert {len(row) for row in cells} == {4}
    assert all(all(row) for row in cells), "every difference has a reason"
    return {row[0].strip("`"): row[2] for row in cells if re.fullmatch(r"`[a-z_.]+`", row[0])}


def test_it_differs_from_the_first_d1_only_as_documented() -> None:
    recipe, table = _with_sft().model_dump(mode="json"), _table()
    differing = {field for field, theirs in FIRST_D1.items() if _at(recipe, field) != theirs}
    assert differing == set(table)


def test_the_documented_values_are_the_recipes() -> None:
    recipe = _with_sft().model_dump(mode="json")
    for field, says in _table().items():
        assert yaml.safe_load(says.strip("`")) == _at(recipe, field), field


def test_its_sft_overrides_keep_examples_as_long_as_s1ks(config: TransformerConfig, tmp_path: Path) -> None:
    """Some are longer than the rollout's canvas of 456 tokens, some longer than 4,096."""
    long = config.model_copy(update={"max_sequence_length": 4096})
    (tmp_path / CONFIG).write_text(json.dumps(write_config(long)))
    make_tokenizer(["1 2 3"], tmp_path, 300)
    s1k = [
        {"question": f"{row} + 1", "thinking_trajectories": ["1 " * (400 + 200 * row)], "attempt": "2"}
        for row in range(20)
    ]
    (tmp_path / "s1k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in s1k))
    problems = tmp_path / "gsm8k.jsonl"
    _write_gsm8k(problems, 20)
    recipe = _with_sft(
        f"sft.data={tmp_path / 's1k.jsonl'}",
        f"model.checkpoint={tmp_path}",
        f"task.train_data={problems}",
        f"task.heldout_data={problems}",
        "num_train_problems=16",
        "evaluation.num_problems=4",
    )
    check_creatable(recipe, make_spec(recipe, Stages.ALL), None, 100)
    assert recipe.sft_micro_batch_tokens == 2 * recipe.sft_tokens == 2 * 4096


@pytest.mark.parametrize("has_sft", [False, True])
def test_its_overrides_for_one_gpu_pass_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_sft: bool
) -> None:
    """140 GB of GPU memory, 125 GiB of main memory, 64 GB of disk."""
    (tmp_path / CONFIG).write_text(json.dumps(write_config(LLADA_8B.config(4096))))
    _write_gsm8k(tmp_path / "train.jsonl", 7473)
    _write_gsm8k(tmp_path / "heldout.jsonl", 1319)
    (tmp_path / "s1k.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    files = (f"model.checkpoint={tmp_path}", f"task.train_data={tmp_path / 'train.jsonl'}")
    given = (
        *_line("# One GPU of 140 GB"),
        *files,
        f"task.heldout_data={tmp_path / 'heldout.jsonl'}",
        f"runs_dir={tmp_path}",
    )
    has = {"num_cpus": 16, "num_gpus": 1, "gpu_memory_bytes": 140 * 10**9, "memory_bytes": 125 * 2**30}
    for name, value in has.items():
        monkeypatch.setattr(machine, name, lambda value=value: value)
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: 62 * 2**30)
    monkeypatch.setattr(machine, "free_bytes", lambda _path: 64 * 10**9)
    recipe = _with_sft(*given, f"sft.data={tmp_path / 's1k.jsonl'}") if has_sft else load_recipe(PATH, given)
    assert preflight(recipe, cluster_resources(None)) == []


def _write_gsm8k(path: Path, count: int) -> None:
    rows = ({"question": f"{row} + 1?", "answer": f"#### {row + 1}"} for row in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("begin", ["# One GPU of 140 GB", "# Colocated on eight GPUs"])
def test_the_overrides_in_its_comments_are_valid(begin: str) -> None:
    plain = load_recipe(PATH, [])
    assert load_recipe(PATH, _line(begin)) != plain
    assert _with_sft(*_line(begin)).sft.num_steps > plain.sft.num_steps
