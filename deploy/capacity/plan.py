"""Capacity plan: the best split of GPUs between samplers and learner workers, and what limits it.

Times exclude grading, and the loading of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.resources import GpuSection
from actors.run_config import RunConfig
from deploy.capacity.flops import (
    evaluation_s,
    learning_canvases,
    learning_flops,
    learning_s,
    publishing_s,
    sampling_flops,
    sampling_s,
    sft_step_s,
)
from deploy.capacity.gpus import GpuKind
from deploy.capacity.memory import ProcessMemory, learner_memory, sampler_memory, why_too_large
from deploy.capacity.shape import policy_shape
from deploy.errors import UserError
from deploy.printing import counted
from learner.model.config import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSplit:
    """Split of GPUs between sampling and learning. On one GPU, and colocated, the same GPUs do both."""

    num_samplers: int
    """Samplers, a GPU each."""
    num_workers: int
    """Learner workers, a GPU each."""
    num_gpus: int
    """GPUs in use."""
    sampling_s: float
    """Seconds to denoise a round's completions."""
    learning_s: float
    """Seconds of a round's updates."""
    round_s: float
    """Seconds of a round: the sum of both, or their maximum if samplers run ahead."""
    why_not: str | None
    """Why it does not fit: which process lacks memory, and the field that helps. None if it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Capacity plan of a recipe on a number of GPUs of one kind."""

    num_gpus: int
    """Number of GPUs."""
    kind: GpuKind
    """Their kind."""
    sampling_flops: float
    """FLOP of sampling per round."""
    learning_flops: float
    """FLOP of learning per round."""
    learning_canvases: float
    """Canvases that an inner update runs for each completion, on average."""
    is_short_of_groups: bool
    """Whether more samplers would be idle, because a round has no more groups."""
    is_colocated: bool
    """Whether the recipe has samplers and learner workers take turns on the same GPUs."""
    splits: tuple[GpuSplit, ...]
    """All splits: those that fit, fastest first, then those that do not."""
    if_colocated: GpuSplit | None
    """The fastest split that fits if colocated; None if the recipe is colocated, cannot be, or none fits."""
    processes: tuple[ProcessMemory, ...]
    """Memory of a sampler and of a learner worker in the first split."""
    has_other_shares: bool
    """Whether the plan has other shares of a GPU than the recipe."""
    sft_step_s: float | None
    """Seconds of an SFT step in the first split; None without SFT."""
    evaluation_s: float
    """Seconds of an evaluation in the first split, at one schedule."""
    publishing_s: float | None
    """Seconds to publish a version; None for full weights, which were not measured."""

    @property
    def best(self) -> GpuSplit | None:
        """The fastest split that fits; None if none does."""
        return self.splits[0] if self.splits[0].why_not is None else None


def make_plan(recipe: RunConfig, num_gpus: int, kind: GpuKind) -> Plan:
    """Plan a recipe.

    Raises ValueError if its checkpoint's config is not available, UserError if these GPUs cannot hold a copy of the
    policy as the recipe shards it.
    """
    shape = policy_shape(recipe)
    shares, is_colocated = _with_shares(recipe, shape, num_gpus), recipe.gpus.colocate
    splits = _splits(shares, shape, num_gpus, kind)
    if not splits:
        raise UserError(
            f"sharding.workers_per_copy {recipe.sharding.workers_per_copy} is more learner workers than a round can "
            f"have on {counted(num_gpus, 'GPU')}; take more GPUs, or smaller copies"
        )
    others = []
    if not is_colocated and not recipe.learner.max_staleness:
        gpus = GpuSection(colocate=True, engine=recipe.gpus.engine)
        others = _splits(recipe.model_copy(update={"gpus": gpus}), shape, num_gpus, kind)
    return Plan(
        num_gpus=num_gpus,
        kind=kind,
        sampling_flops=sampling_flops(recipe, shape),
        learning_flops=learning_flops(recipe, shape),
        learning_canvases=learning_canvases(recipe, shape),
        is_short_of_groups=_most_samplers(recipe) < num_gpus - (not is_colocated),
        is_colocated=is_colocated,
        splits=tuple(splits),
        if_colocated=others[0] if others and others[0].why_not is None else None,
        processes=(sampler_memory(shares, shape), learner_memory(shares, shape, splits[0].num_workers)),
        has_other_shares=shares.gpus != recipe.gpus,
        sft_step_s=sft_step_s(recipe, shape, kind, splits[0].num_workers) if recipe.sft.num_steps else None,
        evaluation_s=evaluation_s(recipe, shape, kind, splits[0].num_samplers),
        publishing_s=publishing_s(recipe, shape),
    )


def _splits(recipe: RunConfig, shape: TransformerConfig, num_gpus: int, kind: GpuKind) -> list[GpuSplit]:
    """Return all splits: those that fit first, then the fastest first."""
    where, learner, found = f"one {kind.name}", recipe.learner, []
    # Indivisible units of learner work: more workers than units would be idle in every round.
    units = learner.groups_per_round * (1 if learner.objective.compares_groups else learner.group_size)
    learning_alone_s = learning_s(recipe, shape, kind)
    sampler = why_too_large(sampler_memory(recipe, shape), kind.memory_bytes, where)
    is_ahead = learner.max_staleness > 0 and num_gpus > 1
    for num_samplers, num_workers in _pairs(recipe, num_gpus, units):
        # The busiest sampler ends the round. Samplers that run ahead continue with the next round.
        of_busiest = 1 / num_samplers if is_ahead else _of_busiest_sampler(recipe, num_samplers)
        sampled_s = sampling_s(recipe, shape, kind, num_samplers) * of_busiest
        learned_s = learning_alone_s * -(-units // num_workers) / units
        too_large = why_too_large(learner_memory(recipe, shape, num_workers), kind.memory_bytes, where)
        split = GpuSplit(
            num_samplers=num_samplers,
            num_workers=num_workers,
            num_gpus=min(num_gpus, num_workers if recipe.gpus.colocate else num_samplers + num_workers),
            sampling_s=sampled_s,
            learning_s=learned_s,
            round_s=max(sampled_s, learned_s) if is_ahead else sampled_s + learned_s,
            why_not=sampler or too_large,
        )
        found.append(split)
    return sorted(found, key=lambda split: (split.why_not is not None, split.round_s))


def _pairs(recipe: RunConfig, num_gpus: int, units: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of sampler and worker counts; workers form whole copies of the policy, and are at most `units`."""
    of_copy = recipe.sharding.workers_per_copy or 1
    if recipe.gpus.colocate:
        for number in range(of_copy, 1 + min(num_gpus, units, _most_samplers(recipe)), of_copy):
            yield number, number
        return
    for num_samplers in range(1, 1 + min(max(1, num_gpus - 1), _most_samplers(recipe))):
        num_workers = min(max(1, num_gpus - num_samplers), units)
        if num_workers >= of_copy:
            yield num_samplers, num_workers - num_workers % of_copy


def _most_samplers(recipe: RunConfig) -> int:
    """Return the number of samplers that can work at the same time."""
    return recipe.learner.groups_per_round * (recipe.learner.max_staleness + 1)


def _of_busiest_sampler(recipe: RunConfig, num_samplers: int) -> float:
    """Return the busiest sampler's share of a round's groups, in whole work units."""
    groups, of_work_unit = recipe.learner.groups_per_round, recipe.groups_per_work_unit_for(num_samplers)
    num_work_units = -(-groups // of_work_unit)
    return min(1.0, -(-num_work_units // num_samplers) * of_work_unit / groups)


def _with_shares(recipe: RunConfig, shape: TransformerConfig, num_gpus: int) -> RunConfig:
    """Return the recipe with whole GPUs; a colocated recipe keeps its shares.

    On a single GPU a recipe keeps its shares if they fit, else they are in proportion to the memory of both processes.
    """
    is_shared = num_gpus == 1 and recipe.gpus.sampler + recipe.gpus.learner <= 1
    if recipe.gpus.colocate or is_shared:
        return recipe
    shares = {"sampler": 1.0, "learner": 1.0}
    if num_gpus == 1:
        sampler, learner = sampler_memory(recipe, shape).num_bytes, learner_memory(recipe, shape, 1).num_bytes
        of_sampler = min(0.95, max(0.05, round(sampler / (sampler + learner), 2)))
        shares = {"sampler": of_sampler, "learner": round(1 - of_sampler, 2)}
    return recipe.model_copy(update={"gpus": recipe.gpus.model_copy(update=shares)})
