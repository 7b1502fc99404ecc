"""Scales of the results table: tasks, completion lengths and recipes of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
DIFFU_GRPO, TRAJECTORY = "diffu-grpo", "trajectory"
# The method of recipes/countdown.yaml: exact per-step likelihoods, with ratios to the sampler's recorded ones.
_TRAJECTORY = (
    "learner.algorithm=cj-grpo",
    "learner.advantage=round_z",
    "learner.group_size=16",
    "learner.inner_updates=1",
    "learner.lr=1e-4",
    "learner.estimator.law=sampler",
    "learner.objective={old: sampler, kl_coef: 0.04, normalize_by: round}",
)
# The first d1's method at the size of recipes/tiny.yaml, with about as many completions.
_TINY_DIFFU_GRPO = (
    "learner.algorithm=diffu-grpo",
    "learner.num_rounds=30",
    "learner.groups_per_round=42",
    "learner.group_size=6",
    "learner.inner_updates=12",
    "learner.lr=1.4e-4",
    "learner.num_warmup_rounds=3",
)
# Half as many denoise steps as slots.
_HALF = ("--schedules", "0.5")
_8B = ("sft.num_steps=1240", "sft.data=s1k.jsonl", "evaluation.every_rounds=0")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableTask:
    """One task of the table."""

    recipe: str
    """Name of the file in `recipes/`."""
    lengths: tuple[int, ...]
    """Completion slots, one column each."""
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe's fields."""
    num_problems: int | None = None
    """Held-out problems per cell. None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Settings of one scale of the table."""

    seeds: tuple[int, ...]
    """Each row is trained once per seed."""
    tasks: Mapping[str, TableTask]
    """Tasks by name, in the order of the table."""
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {DIFFU_GRPO: ()})
    """Overrides of a recipe for RL, by method."""
    base: tuple[str, ...] | None = None
    """Overrides of a recipe for the SFT that makes the base. None: the base is the recipe's `model.checkpoint`."""
    shares_sft: bool = False
    """Whether all tasks share one SFT run per seed, on the same data."""
    evaluation: tuple[str, ...]
    """Options of `d1 eval`."""


def _first_d1(task: str, num_problems: int, num_rounds: int, inner_updates: int) -> TableTask:
    rounds = (f"learner.num_rounds={num_rounds}", f"learner.inner_updates={inner_updates}")
    section = f"task={{name: {task}, reward: d1, protocol: d1}}"
    overrides = (*_8B, section, f"num_train_problems={num_problems}", *rounds)
    return TableTask(recipe="llada-gsm8k.yaml", lengths=(128, 256, 512), overrides=overrides)


SCALES: Mapping[str, Scale] = {
    "tiny": Scale(
        seeds=(0, 1, 2),
        tasks={
            "sudoku": TableTask(recipe="tiny.yaml", lengths=(18, 24, 36), num_problems=600),
            "countdown": TableTask(recipe="countdown.yaml", lengths=(10, 16, 24), num_problems=600),
        },
        methods={DIFFU_GRPO: _TINY_DIFFU_GRPO, TRAJECTORY: ()},
        # This base knows little more than the answer format. Its context has to hold the longest completion.
        base=("sft.num_labels=20", "sft.num_steps=60", "evaluation.schedules=null"),
        evaluation=_HALF,
    ),
    "smollm2": Scale(
        seeds=(42,),
        tasks={
            name: TableTask(recipe=f"smollm2-{name}.yaml", lengths=(128, 256, 512), num_problems=num_problems)
            for name, num_problems in {"countdown": 500, "sudoku": 500, "gsm8k": 1319}.items()
        },
        methods={DIFFU_GRPO: (), TRAJECTORY: _TRAJECTORY},
        evaluation=(*_HALF, "--block-length", "32", "--dtype", "bfloat16", "--slots", "96"),
    ),
    "8b": Scale(
        seeds=(42,),
        tasks={
            "gsm8k": _first_d1("gsm8k", 7473, 4670, 12),
            "math500": _first_d1("math500", 7500, 4680, 12),
            "countdown": _first_d1("countdown", 50000, 1000, 8),
            "sudoku": _first_d1("sudoku", 20000, 1000, 8),
        },
        shares_sft=True,
        evaluation=("--protocol", "d1"),
    ),
}
"""`tiny`: policies from scratch on two CPU cores. `smollm2`: one GPU. `8b`: LLaDA-8B-Instruct with the first d1's
hyperparameters, on eight GPUs of 80 GB, with s1K in `s1k.jsonl`."""
