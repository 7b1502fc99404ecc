"""A capacity plan: how a recipe's samplers and learner workers share so many GPUs best, and what stands in the way.

Seconds leave out grading, and the loading of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from actors.resources import GpuSection
from actors.run_config import RunConfig
from deploy.capacity.arithmetic import learning_flops, sampling_flops
from deploy.capacity.gpus import GpuKind
from deploy.capacity.learner_memory import learner_memory
from deploy.capacity.memory import ProcessMemory, sampler_memory, why_too_large
from deploy.capacity.seconds import evaluation_s, learning_s, publishing_s, sampling_s, sft_step_s
from deploy.capacity.shape import policy_shape
from deploy.errors import UserError
from deploy.printing import counted
from learner.model.config import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How many GPUs sample and how many learn. On one GPU, and colocated, the same ones do both."""

    num_samplers: int
    """Samplers, a GPU each."""
    num_workers: int
    """Learner workers, a GPU each."""
    num_gpus: int
    """GPUs that have something to do."""
    sampling_s: float
    """Seconds to denoise a round's completions."""
    learning_s: float
    """Seconds of its updates."""
    round_s: float
    """Seconds of a round: one after the other, or the longer where samplers run ahead."""
    limit: str | None
    """Why it cannot be: the memory of whom, and the field that helps. None where it can."""

    @property
    def first_limit(self) -> str:
        """What a round waits for most."""
        return "sampling" if self.sampling_s >= self.learning_s else "learning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A recipe on so many GPUs of a kind."""

    num_gpus: int
    """GPUs."""
    kind: GpuKind
    """Which."""
    sampling_flops: float
    """Of a round."""
    learning_flops: float
    """Of a round."""
    is_short_of_groups: bool
    """Whether more samplers would do no more, as a round has no more groups."""
    is_colocated: bool
    """Whether the recipe has samplers and learner workers take turns on the same GPUs."""
    splits: tuple[Split, ...]
    """Every split, the fastest that fits first, then those that do not fit."""
    if_colocated: Split | None
    """The fastest that fits where they would; None where they do, or cannot, or none fits."""
    processes: tuple[ProcessMemory, ...]
    """What a sampler and a learner worker of the first split take."""
    has_other_shares: bool
    """Whether that is with other shares of a GPU than the recipe's."""
    sft_step_s: float | None
    """Seconds of a step of SFT with the first split; None without SFT."""
    evaluation_s: float
    """Seconds of an evaluation with the first split, at one schedule."""
    publishing_s: float | None
    """Seconds to publish a version; None of whole weights, of which it is not known."""

    @property
    def best(self) -> Split | None:
        """The fastest split that fits; None where none does."""
        return self.splits[0] if self.splits[0].limit is None else None


def make_plan(recipe: RunConfig, num_gpus: int, kind: GpuKind) -> Plan:
    """Plan a recipe. Raises ValueError when its checkpoint's config cannot be had, UserError when so many GPUs cannot
    hold a copy of the policy as the recipe shards it."""
    shape = policy_shape(recipe)
    shares, is_colocated = _shares(recipe, shape, num_gpus), recipe.gpus.colocate
    splits = _fastest_first(_splits(shares, shape, num_gpus, kind))
    if not splits:
        raise UserError(
            f"sharding.workers_per_copy {recipe.sharding.workers_per_copy} is more learner workers than a round can "
            f"have on {counted(num_gpus, 'GPU')}; take more GPUs, or smaller copies"
        )
    others = []
    if not is_colocated and not recipe.learner.max_staleness:
        others = _fastest_first(_splits(_colocated(recipe), shape, num_gpus, kind))
    return Plan(
        num_gpus=num_gpus,
        kind=kind,
        sampling_flops=sampling_flops(recipe, shape),
        learning_flops=learning_flops(recipe, shape),
        is_short_of_groups=_most_samplers(recipe) < num_gpus - (not is_colocated),
        is_colocated=is_colocated,
        splits=tuple(splits),
        if_colocated=others[0] if others and others[0].limit is None else None,
        processes=(sampler_memory(shares, shape), learner_memory(shares, shape, splits[0].num_workers)),
        has_other_shares=shares.gpus != recipe.gpus,
        sft_step_s=sft_step_s(recipe, shape, kind, splits[0].num_workers) if recipe.sft.num_steps else None,
        evaluation_s=evaluation_s(recipe, shape, kind, splits[0].num_samplers),
        publishing_s=publishing_s(recipe, shape),
    )


def _splits(recipe: RunConfig, shape: TransformerConfig, num_gpus: int, kind: GpuKind) -> Iterator[Split]:
    where = f"one {kind.name}"
    learner = recipe.learner
    # What cannot be shared out further: more workers would wait in every round.
    units = learner.groups_per_round * (1 if learner.objective.compares_groups else learner.group_size)
    learning_alone_s = learning_s(recipe, shape, kind)
    sampler = why_too_large(sampler_memory(recipe, shape), kind.memory_bytes, where)
    for num_samplers, num_workers in _pairs(recipe, num_gpus, units):
        too_large = why_too_large(learner_memory(recipe, shape, num_workers), kind.memory_bytes, where)
        is_ahead = learner.max_staleness > 0 and num_gpus > 1
        # The busiest ends the round. Samplers that run ahead go on with the next one.
        of_busiest = 1 / num_samplers if is_ahead else _of_busiest_sampler(recipe, num_samplers)
        sampled_s = sampling_s(recipe, shape, kind, num_samplers) * of_busiest
        learned_s = learning_alone_s * _of_busiest(units, num_workers)
        yield Split(
            num_samplers=num_samplers,
            num_workers=num_workers,
            num_gpus=min(num_gpus, num_workers if recipe.gpus.colocate else num_samplers + num_workers),
            sampling_s=sampled_s,
            learning_s=learned_s,
            round_s=max(sampled_s, learned_s) if is_ahead else sampled_s + learned_s,
            limit=sampler or too_large,
        )


def _pairs(recipe: RunConfig, num_gpus: int, units: int) -> Iterator[tuple[int, int]]:
    """So many samplers with so many learner workers, who share out `units` at most, in whole copies of the policy."""
    of_copy = recipe.sharding.workers_per_copy or 1
    if recipe.gpus.colocate:
        for number in range(1, 1 + min(num_gpus, units, _most_samplers(recipe))):
            if number % of_copy == 0:
                yield number, number
        return
    for num_samplers in range(1, 1 + min(max(1, num_gpus - 1), _most_samplers(recipe))):
        num_workers = min(max(1, num_gpus - num_samplers), units)
        if num_workers >= of_copy:
            yield num_samplers, num_workers - num_workers % of_copy


def _fastest_first(splits: Iterable[Split]) -> list[Split]:
    return sorted(splits, key=lambda split: (split.limit is not None, split.round_s))


def _most_samplers(recipe: RunConfig) -> int:
    """Samplers that can be at work at a time."""
    return recipe.learner.groups_per_round * (recipe.learner.max_staleness + 1)


def _of_busiest_sampler(recipe: RunConfig, num_samplers: int) -> float:
    """The share of a round's groups that the busiest sampler has, in whole portions."""
    groups, of_portion = recipe.learner.groups_per_round, recipe.portion_groups_for(num_samplers)
    num_portions = -(-groups // of_portion)
    return min(1.0, -(-num_portions // num_samplers) * of_portion / groups)


def _of_busiest(num_units: int, num_processes: int) -> float:
    """The share of some units that the busiest of some processes has."""
    return -(-num_units // num_processes) / num_units


def _shares(recipe: RunConfig, shape: TransformerConfig, num_gpus: int) -> RunConfig:
    """The recipe with whole GPUs; on one, with the shares that it says, or else in proportion to what both take. Where
    both take turns their shares are the recipe's."""
    shares = {"sampler": 1.0, "learner": 1.0}
    if recipe.gpus.colocate:
        return recipe
    if num_gpus == 1 and recipe.gpus.sampler + recipe.gpus.learner <= 1:
        return recipe
    if num_gpus == 1:
        sampler, learner = sampler_memory(recipe, shape).num_bytes, learner_memory(recipe, shape, 1).num_bytes
        of_sampler = min(0.95, max(0.05, round(sampler / (sampler + learner), 2)))
        shares = {"sampler": of_sampler, "learner": round(1 - of_sampler, 2)}
    return recipe.model_copy(update={"gpus": recipe.gpus.model_copy(update=shares)})


def _colocated(recipe: RunConfig) -> RunConfig:
    return recipe.model_copy(update={"gpus": GpuSection(colocate=True, engine=recipe.gpus.engine)})
