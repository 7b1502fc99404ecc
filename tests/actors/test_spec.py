"""Settings that a run derives from its recipe: sampler, micro-batches, adapters and timeouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.plan import RunPlan
from actors.run_config import ControlSection, ModelSection
from actors.spec import Phase, RunSpec, sampler_facts
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig
from learner.model.networks import make_model
from learner.model.tokenizer import ChatTokenizer
from learner.model.transformer import Transformer, init_weights
from learner.sft.config import SftConfig
from rewards import TaskConfig
from rewards.maths import Limits
from rewards.sandbox import SandboxConfig
from rewards.tasks.jsonl import JsonlConfig
from rewards.tasks.kodcode import KodcodeConfig
from rewards.tasks.math500 import Math500Config
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler

# A random policy gives no answer that a strict grader accepts.
SCHEDULES: list[dict[str, object]] = [
    {},
    {"schedule": "random"},
    {"schedule": "left_to_right"},
    {"entropy_bound": 0.01},
    {"threshold": 0.999},
    {"factor": 0.01},
    {"schedule": "left_to_right", "threshold": 0.999},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_has_fallback_agrees_with_sampled_completions(schedule: dict[str, object], policy: Transformer) -> None:
    shape = {"gen_length": 8, "block_length": 4, "num_denoise_steps": 8, "temperature": 1.0, "stop_ids": ()}
    params = SamplingParams.model_validate(shape | schedule)
    (completion,) = Sampler(policy, 0).generate([Request(prompt_ids=(1, 2, 3), params=params, seed=1)])
    assert completion.fallback.any() == sampler_facts(params).has_fallback


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_max_denoise_steps_agrees_with_sampled_completions(schedule: dict[str, object], policy: Transformer) -> None:
    shape = {"gen_length": 8, "block_length": 4, "num_denoise_steps": 4, "temperature": 1.0, "stop_ids": ()}
    params = SamplingParams.model_validate(shape | schedule)
    (completion,) = Sampler(policy, 0).generate([Request(prompt_ids=(1, 2, 3), params=params, seed=1)])
    assert int(completion.step_map.max()) + 1 == sampler_facts(params).max_denoise_steps


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_has_varying_steps_agrees_with_a_confident_policy(schedule: dict[str, object], policy: Transformer) -> None:
    shape = {"gen_length": 8, "block_length": 4, "num_denoise_steps": 8, "temperature": 1.0, "stop_ids": ()}
    params = SamplingParams.model_validate(shape | schedule)
    with torch.no_grad():
        policy.head.weight.mul_(1e4)
    (completion,) = Sampler(policy, 0).generate([Request(prompt_ids=(1, 2, 3), params=params, seed=1)])
    assert (completion.num_forwards < 8) == sampler_facts(params).has_varying_steps


@pytest.mark.parametrize(
    ("changes", "most"), [({}, 3 * 2), ({"threshold": 0.999}, 3 * 2), ({"steps_per_block": 4}, 12)]
)
def test_steps_per_block_bound_the_steps_of_all_blocks(
    changes: dict[str, object], most: int, config: TransformerConfig
) -> None:
    """Three blocks where a block-causal policy's first block begins in the prompt, otherwise two."""
    shape = {"gen_length": 8, "block_length": 4, "steps_per_block": 2, "temperature": 1.0, "stop_ids": ()}
    params = SamplingParams.model_validate(shape | changes)
    causal = make_model(config.model_copy(update={"family": "sdar", "block_length": 4}))
    init_weights(causal, seed=0)
    (completion,) = Sampler(causal, 0).generate([Request(prompt_ids=(1, 2, 3), params=params, seed=1)])
    num_steps = int(completion.step_map.max()) + 1
    assert sampler_facts(params, is_block_causal=True).max_denoise_steps == most
    assert most - params.num_block_steps < num_steps <= most
    assert sampler_facts(params).max_denoise_steps == most * 2 // 3


def test_timeouts_grow_with_the_size_of_the_weights(spec: RunSpec, tmp_path: Path) -> None:
    """For LLaDA-8B, 16 GB in bfloat16: published in at most 32 GB, and read twice as a checkpoint."""
    assert spec.sampling_timeout_s == pytest.approx(600, abs=0.1)
    assert spec.collective_timeout_s == pytest.approx(900, abs=0.1)
    large = spec.model_copy(update={"run_dir": tmp_path})
    large.initial_checkpoint.mkdir(parents=True)
    files = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    (large.initial_checkpoint / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {str(index): name for index, name in enumerate(files)}})
    )
    for name in files:
        with (large.initial_checkpoint / name).open("wb") as file:
            file.truncate(8_000_000_000)
    assert large.sampling_timeout_s == 600 + 640
    assert large.collective_timeout_s == 900 + 1280


@pytest.mark.parametrize(
    ("task", "longest_s"),
    [
        (KodcodeConfig(sandbox=SandboxConfig(wall_s=7)), 7),
        (Math500Config(), Limits().timeout_s),
        (JsonlConfig(train_data=Path("x"), grader="math"), Limits().timeout_s),
        (JsonlConfig(train_data=Path("x"), grader="exact"), None),
    ],
    ids=["programs", "maths", "maths of a file", "nothing that runs"],
)
def test_the_grading_timeout_covers_the_slowest_completions(
    spec: RunSpec, task: TaskConfig, longest_s: float | None
) -> None:
    """Programs that loop and comparisons that do not end fail one by one, without failing their work unit."""
    run = spec.model_copy(update={"task": task})
    if longest_s is None:
        assert run.grading_timeout_s == spec.grading_timeout_s == spec.grading.timeout_s
    else:
        assert run.grading_timeout_s > spec.grading.timeout_s + 8 * longest_s


@pytest.mark.parametrize(("batch_size", "group_size"), [(8, 4), (7, 3), (2, 5)])
def test_work_units_are_limited_by_the_graders_time(spec: RunSpec, batch_size: int, group_size: int) -> None:
    run = spec.model_copy(
        update={
            "rollout": spec.rollout.model_copy(update={"batch_size": batch_size}),
            "learner": spec.learner.model_copy(update={"group_size": group_size}),
        }
    )
    plan = RunPlan(run, ChatTokenizer(spec.initial_checkpoint))
    work_units = [plan.round_work_unit(0, index) for index in range(plan.work_units_per_round)]
    evaluated = plan.evaluation_work_units(run.evaluated_params[0], load_config(spec.initial_checkpoint))
    assert max(len(work_unit.requests) for work_unit in (*work_units, *evaluated)) <= run.max_requests_per_work_unit


@pytest.mark.parametrize(("given", "found"), [(None, 80), (1000, 80), (50, 50), (7, 20)])
def test_an_sft_micro_batch_has_between_one_row_and_a_workers_examples(
    spec: RunSpec, given: int | None, found: int
) -> None:
    """Eight examples of at most 20 tokens, on two workers."""
    sft = spec.sft.model_copy(update={"micro_batch_tokens": given})
    assert spec.model_copy(update={"sft": sft}).sft_micro_batch_tokens == found


def test_the_control_needs_examples_when_sft_is_skipped(spec: RunSpec) -> None:
    skipped = dict(spec) | {"sft": SftConfig(num_steps=0, max_tokens=4096)}
    with pytest.raises(
        ValueError, match=r"sft\.num_labels is missing; .* the control trains on them too, unless control"
    ):
        RunSpec.model_validate(skipped)
    without = RunSpec.model_validate(skipped | {"control": ControlSection(enabled=False)})
    assert without.longest_canvas == without.canvas_tokens == 20, "nothing has canvases of 4096"


def test_sft_and_control_may_have_their_own_lora_alpha(spec: RunSpec) -> None:
    lora = LoraConfig(rank=4, alpha=8)
    adapted = spec.model_copy(update={"model": ModelSection(lora=lora)})
    assert {adapted.lora_of(phase) for phase in Phase} == {lora}
    own = adapted.model_copy(update={"sft": spec.sft.model_copy(update={"lora_alpha": 16})})
    assert {phase: own.lora_of(phase).alpha for phase in Phase} == {"untrained": 16, "sft": 16, "rl": 8, "control": 16}
    assert own.lora_of(Phase.SFT) == LoraConfig(rank=4, alpha=16)
