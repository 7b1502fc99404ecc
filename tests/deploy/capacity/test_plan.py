"""Capacity plans: the GPUs that a recipe needs, the fastest split that fits, and advice if none does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import models
from deploy.capacity.gpus import GPU_KINDS, GpuKind, smallest_memory
from deploy.capacity.memory import ProcessMemory, engine_memory, learner_memory, sampler_memory
from deploy.capacity.needs import needs_of
from deploy.capacity.plan import Plan, make_plan
from deploy.capacity.shape import policy_shape
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from learner.model.families.llada import write_config
from learner.planning.sizes import ParameterCounts

LLADA_8B = models.LLADA_8B.config(4096)
RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def llada(tmp_path: Path) -> Callable[..., Recipe]:
    """The recipe for LLaDA-8B, with a checkpoint that has only a config."""
    (tmp_path / "config.json").write_text(json.dumps(write_config(LLADA_8B)))
    return lambda *overrides: load_recipe(
        RECIPES / "llada-gsm8k.yaml", [f"model.checkpoint={tmp_path}", "device=cuda", *overrides]
    )


def _plan(recipe: Recipe, num_gpus: int, kind: str = "H100") -> Plan:
    return make_plan(recipe, num_gpus, GPU_KINDS[kind])


def test_eight_gpus_are_split_by_the_bottleneck(llada: Callable[..., Recipe]) -> None:
    """A round has 16 groups, and a sampler takes four at once: five samplers take as long as four."""
    plan = _plan(llada(), 8)
    assert plan.best is not None
    assert (plan.best.num_samplers, plan.best.num_workers) == (4, 4)
    assert [split.num_samplers for split in plan.splits] == [4, 5, 6, 2, 3, 7, 1]
    of_all = [split.sampling_s * 16 for split in plan.splits if split.num_samplers == 1]
    busiest = {split.num_samplers: split.sampling_s * 16 / of_all[0] * 16 for split in plan.splits}
    assert busiest == pytest.approx({1: 16, 2: 8, 3: 8, 4: 4, 5: 4, 6: 3, 7: 3})
    assert not plan.is_short_of_groups
    assert _plan(llada(), 64).is_short_of_groups
    # docs/scaling.md derives these from the FLOP of one forward.
    assert plan.learning_flops == pytest.approx(30.9e15, rel=0.01)
    assert plan.best.sampling_s == pytest.approx(37.4, rel=0.01)
    assert plan.best.learning_s == pytest.approx(20.7, rel=0.01)
    assert plan.best.round_s == plan.best.sampling_s + plan.best.learning_s


def test_recomputation_takes_time(llada: Callable[..., Recipe]) -> None:
    """Activation checkpointing recomputes the blocks' forward for every gradient, in the rounds and in SFT."""
    seconds = [
        (plan.splits[0].learning_s, plan.sft_step_s)
        for way in ("true", "false")
        for plan in [_plan(llada(f"sharding.activation_checkpointing={way}", *S1K), 1, "H200")]
    ]
    (learning, sft), (learning_once, sft_once) = seconds
    assert sft is not None
    assert sft_once is not None
    # With frozen weights a backward costs one forward. Recomputing adds 12 to 47 forwards in the rounds, and 1 to 2
    # in SFT, without the head.
    assert learning / learning_once == pytest.approx(1.25, abs=0.02)
    assert sft / sft_once == pytest.approx(1.45, abs=0.03)


def test_samplers_that_run_ahead_hide_the_shorter_phase(llada: Callable[..., Recipe]) -> None:
    estimator = "learner.estimator={name: trajectory, steps_per_segment: 1, law: sampler}"
    exact = (estimator, "learner.objective={name: clipped_ratio, old: sampler}", "learner.max_staleness=1")
    plan = _plan(llada(*exact), 8)
    for split in plan.splits:
        assert split.round_s == max(split.sampling_s, split.learning_s)
    assert plan.best is not None
    assert plan.best.round_s == min(split.round_s for split in plan.splits)


def test_no_worker_without_rows_is_planned(llada: Callable[..., Recipe]) -> None:
    small = ("learner.groups_per_round=2", "learner.group_size=2", "rollout.batch_size=2", "learner.num_workers=2")
    plan = _plan(llada(*small, "rollout.num_samplers=2"), 64)
    assert {split.num_workers for split in plan.splits} == {4}
    assert max(split.num_samplers for split in plan.splits) == 2


def test_only_whole_copies_of_the_policy_are_planned(llada: Callable[..., Recipe]) -> None:
    copies = ("sharding.workers_per_copy=4", "learner.num_workers=4")
    for more in ((), ("gpus.colocate=true",)):
        plan = _plan(llada(*copies, *more), 10)
        assert {split.num_workers for split in plan.splits} == {4, 8}
        with pytest.raises(UserError, match=r"sharding\.workers_per_copy 4 is more .* on 3 GPUs; take more GPUs"):
            _plan(llada(*copies, *more), 3)


def test_one_gpu_is_shared_in_proportion_to_memory(llada: Callable[..., Recipe]) -> None:
    plan = _plan(llada(), 1, "H200")
    assert plan.best is not None
    sampler, learner = plan.processes
    assert sampler.share + learner.share == pytest.approx(1)
    assert sampler.share == pytest.approx(sampler.num_bytes / (sampler.num_bytes + learner.num_bytes), abs=0.01)
    mine = _plan(llada("learner.num_workers=1", "gpus={sampler: 0.4, learner: 0.5}"), 1, "H200")
    assert [process.share for process in mine.processes] == [0.4, 0.5]


def test_colocated_processes_need_gpu_memory_for_one_at_a_time(llada: Callable[..., Recipe]) -> None:
    """And no GPU idles while others work."""
    shared = llada("rollout.batch_size=12", "rollout.num_samplers=4")
    turns = llada("rollout.batch_size=12", "rollout.num_samplers=4", "gpus.colocate=true")
    alone, together = _plan(shared, 8), _plan(turns, 8)
    assert alone.best is not None
    assert together.best is not None
    assert (together.best.num_samplers, together.best.num_workers, together.best.num_gpus) == (8, 8, 8)
    assert together.best.round_s == pytest.approx(alone.best.round_s / 2, rel=0.01)
    assert alone.if_colocated == together.best
    assert together.if_colocated is None
    sampler, learner = together.processes
    assert sampler.num_bytes == alone.processes[0].num_bytes + 2e9, "what CUDA and NCCL keep of an offloaded learner"
    assert "CUDA of an offloaded sampler" in [part.name for part in learner.parts]
    # Each fits the GPU alone, but not both together.
    small = GpuKind(name="small", memory_bytes=38 * 10**9, flop_per_s=1e15)
    one = ("rollout.num_samplers=1", "learner.num_workers=1")
    assert make_plan(llada(*one), 1, small).best is None
    assert make_plan(llada(*one, "gpus.colocate=true"), 1, small).best is not None
    assert make_plan(llada(*one), 1, small).if_colocated is not None


def test_an_offloaded_learner_takes_main_memory(llada: Callable[..., Recipe]) -> None:
    recipe = llada("gpus.colocate=true")
    apart, turns = needs_of(llada()), needs_of(recipe)
    counts = ParameterCounts.of(LLADA_8B, recipe.model.lora)
    # The adapter's base in bfloat16, and the adapter with AdamW's moments.
    assert turns.memory_bytes - apart.memory_bytes == 2 * counts.policy + 12 * counts.adapter
    assert (apart.gpus, turns.gpus) == (8, 4)


def test_a_process_that_does_not_fit_reports_sizes_and_what_helps(llada: Callable[..., Recipe]) -> None:
    plan = _plan(llada("rollout.engine.dtype=float32"), 8, "L4")
    assert plan.best is None
    assert plan.splits[0].why_not == (
        "a sampler takes at least 36.3 GB of GPU memory (weights 32.1), and one L4 has 24.0; take "
        "rollout.engine.dtype=bfloat16"
    )
    fitting = llada("rollout.engine.num_slots=1", "model.lora={rank: 0}", "learner.num_workers=1")
    learner = _plan(fitting, 2).splits[0].why_not
    assert learner is not None
    assert learner.startswith("a learner worker takes at least ")
    assert learner.endswith("and one H100 has 85.9; take more learner.num_workers or LoRA (model.lora.rank)")


@pytest.mark.parametrize(
    ("overrides", "who", "part", "factor"),
    [
        (("rollout.engine.num_slots=48", "rollout.batch_size=48"), sampler_memory, "activations", 2.0),
        (("rollout.engine.num_slots=48", "rollout.batch_size=48"), sampler_memory, "logits of the blocks", 2.0),
        (("rollout.engine.num_slots=48",), sampler_memory, "activations", 1.0),
        (("rollout.engine.dtype=float32",), sampler_memory, "weights", 2.0),
        (("learner.micro_batch_tokens=16384",), learner_memory, "activations", 2.0),
        (("model.lora.rank=64",), learner_memory, "gradient and AdamW's moments", 0.5),
    ],
)
def test_each_part_shrinks_with_its_field(
    llada: Callable[..., Recipe], overrides: tuple[str, ...], who: Callable, part: str, factor: float
) -> None:
    sizes = []
    for changes in ((), overrides):
        recipe = llada(*changes)
        more = (recipe.learner.num_workers,) if who is learner_memory else ()
        process = who(recipe, policy_shape(recipe), *more)
        sizes.append({each.name: each.num_bytes for each in process.parts}[part])
    assert sizes[1] == pytest.approx(factor * sizes[0])


def test_fp8_weights_are_held_beside_the_others(llada: Callable[..., Recipe]) -> None:
    recipe = llada("rollout.engine.fp8=true")
    sizes = {part.name: part.num_bytes for part in sampler_memory(recipe, policy_shape(recipe)).parts}
    # One byte instead of two, and none of the embedding and the head.
    assert 0.4 * sizes["weights"] < sizes["FP8 weights"] < 0.5 * sizes["weights"]


def test_step_answers_need_the_logits_of_whole_canvases(llada: Callable[..., Recipe]) -> None:
    recipe = llada("learner.algorithm=egspo-sa", "rollout.sampling.block_length=32")
    sizes = {part.name: part.num_bytes for part in sampler_memory(recipe, policy_shape(recipe)).parts}
    # Eight blocks, in bfloat16 alone.
    assert recipe.rollout.sampling.gen_length == 256
    assert sizes["logits of step answers"] == pytest.approx(8 * 2 / 10 * sizes["logits of the blocks"])
    plain = {part.name for part in sampler_memory(llada(), policy_shape(recipe)).parts}
    assert "logits of step answers" not in plain


S1K = (
    "sft.data=s1k.jsonl",
    "sft.num_steps=10",
    "sft.max_tokens=4096",
    "sft.batch_size=64",
    "sft.micro_batch_tokens=null",
)


def _parts(recipe: Recipe, num_workers: int = 4) -> dict[str, float]:
    return {part.name: part.num_bytes for part in learner_memory(recipe, LLADA_8B, num_workers).parts}


def test_sft_counts_if_it_takes_more_memory_than_the_rounds(llada: Callable[..., Recipe]) -> None:
    """A worker holds its whole share of a batch, or a micro-batch of it."""
    rounds, sft = learner_memory(llada(), LLADA_8B, 4), learner_memory(llada(*S1K), LLADA_8B, 4)
    assert (rounds.label, sft.label) == ("a learner worker", "a learner worker in SFT")
    # 16 documents of 4,096 tokens, eight times the micro-batch of the rounds.
    assert _parts(llada(*S1K))["activations"] == 8 * _parts(llada())["activations"]
    micro = llada(*S1K, "sft.micro_batch_tokens=8192")
    assert _parts(micro)["activations"] == _parts(llada())["activations"]
    assert learner_memory(micro, LLADA_8B, 4).label == "a learner worker", "which then has SFT's adapter too"
    # At least one document.
    assert _parts(llada(*S1K, "sft.micro_batch_tokens=1", "learner.micro_batch_tokens=1"))["activations"] == (
        _parts(llada())["activations"] / 2
    )
    small = GpuKind(name="small", memory_bytes=40 * 10**9, flop_per_s=1e15)
    limit = make_plan(llada(*S1K), 2, small).splits[0].why_not
    assert limit is not None
    assert limit.startswith("a learner worker in SFT takes at least ")
    assert limit.endswith("take a smaller sft.micro_batch_tokens")


def test_only_the_stages_of_a_run_count(llada: Callable[..., Recipe]) -> None:
    """The control is SFT again, in addition to the adapter of the first SFT."""
    both = learner_memory(llada(*S1K, "control.enabled=true"), LLADA_8B, 4)
    assert both.label == "a learner worker in the control"
    assert "the adapter of SFT" in {part.name for part in both.parts}
    large = ("learner.micro_batch_tokens=1000000", "sft.micro_batch_tokens=4096")
    assert learner_memory(llada(*S1K, *large), LLADA_8B, 4).label == "a learner worker"
    alone = learner_memory(llada(*S1K, *large, "learner.num_rounds=0"), LLADA_8B, 4)
    assert alone.label == "a learner worker in SFT"


def test_a_shorter_canvas_is_suggested_if_one_canvas_is_too_large(llada: Callable[..., Recipe]) -> None:
    tight = GpuKind(name="tight", memory_bytes=20 * 10**9, flop_per_s=1e15)
    one = ("sft.micro_batch_tokens=1", "sharding.activation_checkpointing=false", "learner.micro_batch_tokens=1")
    limits = [
        make_plan(llada(*given, *one, "rollout.engine.num_slots=1"), 8, tight).splits[0].why_not for given in ((), S1K)
    ]
    assert limits[0] is None
    assert limits[1] is not None
    assert limits[1].endswith("take sharding.activation_checkpointing=true or a smaller sft.max_tokens")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sampler_holds_one_base_and_the_adapter_of_each_stage(llada: Callable[..., Recipe], dtype: str) -> None:
    counts, each = ParameterCounts.of(LLADA_8B, llada().model.lora), 2 if dtype == "bfloat16" else 4

    def held(process: ProcessMemory) -> float:
        parts = {part.name: part.num_bytes for part in process.parts}
        return (parts["weights"] + parts.get("adapters", 0) + parts.get("other versions", 0)) / each

    one, after_sft = (llada(f"rollout.engine.dtype={dtype}", *more) for more in ((), S1K))
    assert held(sampler_memory(one, LLADA_8B)) == counts.policy + counts.adapter
    assert held(sampler_memory(after_sft, LLADA_8B)) == counts.policy + 2 * counts.adapter
    # Versions of an engine share the base, and what SFT added to it.
    assert held(engine_memory(after_sft, LLADA_8B, 4)) == counts.policy + 5 * counts.adapter
    whole = llada(f"rollout.engine.dtype={dtype}", "model.lora={rank: 0, base_weights: full}")
    assert held(sampler_memory(whole, LLADA_8B)) == counts.policy
    assert held(engine_memory(whole, LLADA_8B, 4)) == 4 * counts.policy


@pytest.mark.parametrize("base_weights", ["full", "nf4"])
def test_a_learner_holds_the_base_as_the_checkpoint_has_it_in_all_stages(
    llada: Callable[..., Recipe], base_weights: str
) -> None:
    lora = f"model.lora.base_weights={base_weights}"
    counts = ParameterCounts.of(LLADA_8B, llada().model.lora)
    alone, after_sft = (_parts(llada(lora, *more)) for more in ((), (*S1K, "sft.micro_batch_tokens=8192")))
    base = "weights in bfloat16" if base_weights == "full" else "weights, of blocks in 4 bits"
    assert alone[base] == after_sft[base]
    # 4.5 bits per weight of the blocks, unsharded on every worker.
    in_4_bits = 4.5 / 8 * counts.blocks + counts.root
    assert alone[base] == pytest.approx(2 * counts.policy / 4 if base_weights == "full" else in_4_bits)
    gathered = alone["gathered blocks, embedding and head"] - 2 * (counts.root + 5 * counts.adapter_of_block)
    assert gathered == 2 * (2 * counts.block if base_weights == "full" else 4096 * 12288), "4 bits are whole by layers"
    assert "the adapter of SFT" not in alone
    assert after_sft["the adapter of SFT"] == 2 * counts.adapter, "whole on every worker, as it computes"
    assert after_sft["the adapter in float32"] == alone["the adapter in float32"] == counts.adapter


def test_a_run_from_a_lora_checkpoint_begins_with_merged_weights_in_float32(
    llada: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = llada()
    counts = ParameterCounts.of(policy_shape(recipe), recipe.model.lora)
    before = learner_memory(recipe, policy_shape(recipe), 1).num_bytes, needs_of(recipe).disk_bytes
    (tmp_path / "lora.safetensors").touch()
    after = learner_memory(recipe, policy_shape(recipe), 1).num_bytes, needs_of(recipe).disk_bytes
    assert after[0] - before[0] == 2 * counts.policy
    assert after[1] - before[1] == 4 * counts.policy


def test_versions_fetched_from_the_learners_gpus_count_there(llada: Callable[..., Recipe]) -> None:
    whole = ("model.lora={rank: 0, base_weights: full}",)
    apart, there = llada(*whole), llada(*whole, "weight_transport=nixl")
    counts = ParameterCounts.of(LLADA_8B, apart.model.lora)
    # Two versions kept by the store and one arriving, in bfloat16 as samplers compute.
    assert _parts(there)["versions that samplers fetch"] == 3 * 2 * counts.policy / 4
    assert "versions that samplers fetch" not in _parts(apart)
    assert needs_of(apart).object_store_bytes == 3 * 2 * counts.policy
    assert needs_of(there).object_store_bytes == 0


def test_a_gradient_that_is_reduced_once_counts_whole_on_every_worker(llada: Callable[..., Recipe]) -> None:
    """An adapter's, whatever the number of workers; not one of 8 billion parameters, nor that of a single worker."""
    recipe, whole = llada(), llada("model.lora={rank: 0}")
    counts = ParameterCounts.of(LLADA_8B, recipe.model.lora)
    for num_workers in (2, 8):
        assert _parts(recipe, num_workers)["gradient of this worker"] == 4 * counts.adapter
    assert "gradient of this worker" not in _parts(recipe, 1) | _parts(whole, 4)


def test_full_fine_tuning_takes_four_floats_per_parameter(llada: Callable[..., Recipe]) -> None:
    recipe = llada("model.lora={rank: 0}")
    parts = {part.name: part.num_bytes for part in learner_memory(recipe, LLADA_8B, 4).parts}
    weights = parts["weights in float32"]
    assert weights == pytest.approx(32.06e9 / 4, rel=1e-3)
    # In bfloat16, the compute dtype.
    assert parts["the reference"] == weights / 2
    assert parts["gradient and AdamW's moments"] == 3 * weights
    with_value = _parts(llada("model.lora={rank: 0}", "learner.algorithm=tracerl-value", "learner.group_size=8"), 4)
    assert with_value["the value model, gradient and moments"] == 4 * weights, (
        "a second network with its gradient and moments"
    )
    offloaded = learner_memory(llada("model.lora={rank: 0}", "sharding.cpu_offload=true"), LLADA_8B, 4)
    assert not {part.name for part in offloaded.parts} & {"weights in float32", "gradient and AdamW's moments"}
    without = {part.name: part.num_bytes for part in learner_memory(recipe, LLADA_8B, 4).parts}["activations"]
    plain = llada("sharding.activation_checkpointing=false", "model.lora={rank: 0}")
    kept = {part.name: part.num_bytes for part in learner_memory(plain, LLADA_8B, 4).parts}["activations"]
    assert kept > 8 * without


def test_the_command_prints_tables_and_what_to_add_to_train(
    d1: Callable, tmp_path: Path, llada: Callable[..., Recipe]
) -> None:
    llada()
    words = ("plan", str(RECIPES / "llada-gsm8k.yaml"), f"model.checkpoint={tmp_path}")
    ended = d1(*words, "--gpus", "8")
    assert ended.status == 0
    assert "A sampler on one H100" in ended.out
    assert "Best: device=cuda rollout.num_samplers=4 learner.num_workers=4\n" in ended.out
    assert "All numbers are derived" in ended.out
    assert "30.9 PFLOP of learning per round (canvases of a completion in an inner update: 1)" in ended.out
    assert "Other phases, with the first split: an evaluation 8 min 43 s" in ended.out
    assert "publishing 0.7 s." in ended.out
    assert "Colocated on the same GPUs, a round takes 29 s: rollout.num_samplers=8 learner.num" in ended.out
    ended = d1(*words, "gpus={sampler: 0.4, learner: 0.6}", "learner.num_workers=1", "--gpus", "8")
    assert "Best: device=cuda rollout.num_samplers=4 learner.num_workers=4 'gpus={sampler: 1, learner: 1}'" in ended.out
    ended = d1(*words, "rollout.engine.dtype=float32", "--gpus", "8", "--gpu", "L4")
    assert ended.status == 2
    assert "Does not fit: a sampler takes at least 36.3 GB" in ended.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--gpus", "0"), "--gpus 0 is no number of GPUs from 1 to 4096"),
        (("--gpus", "8", "--gpu", "H900"), "--gpu H900 is not known here; there are L4, L40S, A100-40G"),
        (("model.checkpoint=nowhere", "--gpus", "8"), "model.checkpoint: nowhere is no directory"),
    ],
)
def test_an_impossible_plan_is_refused(d1: Callable, recipe_file: Path, words: tuple[str, ...], why: str) -> None:
    d1("plan", str(recipe_file), *words).assert_refused(why)


def test_a_cluster_has_the_memory_of_its_smallest_gpu() -> None:
    assert smallest_memory({"CPU": 8.0, "GPU": 2.0}) is None
    assert smallest_memory({"accelerator_type:H200": 1.0, "accelerator_type:L4": 1.0}) == 24 * 10**9
    assert smallest_memory({"accelerator_type:H200": 1.0, "accelerator_type:A100": 1.0}) is None
