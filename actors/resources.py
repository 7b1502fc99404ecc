"""What each actor of a run asks of Ray, and how a recipe says it: for the actors and for the preflight.

On CPU a run's processes share cores, so they ask for fractions: a laptop with two logical CPUs places two samplers, two
learner workers and everything around them. The embedded registry and Ray Train's controller ask for none, a replica of
the service for next to none. On GPUs each has one, or the share of one that the recipe's `gpus` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

WeightTransport = Literal["object_store", "nixl", "cuda_ipc"]
OBJECT_STORE: WeightTransport = "object_store"

_SMALL_CPUS = 0.1
_COMPUTE_CPUS = 0.4
# Ray counts in ten-thousandths.
_GPU_TOLERANCE = 1e-4
_FIRST_OF_TWO = 0.51


class GpuSection(BaseModel):
    """How GPUs are shared, with `device: cuda`. Ray puts what adds up to one on the same GPU where it has to, and no
    process takes more of that GPU's memory than its share."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    colocate: bool = False
    """Put a sampler beside each learner worker, on the same GPU, where they take turns: while one works the other
    sleeps, with its memory given back. The shares of the two need not add up to one then: each is what its process has
    in its turn. Only with `learner.max_staleness: 0`, with which they would wait for each other anyway."""
    sampler: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU that each sampler has."""
    learner: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU that each learner worker has. Less than 1 is for one worker: NCCL takes no GPU twice."""
    engine: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a GPU that each engine of the run's service has; 0: it computes on the CPU."""

    @property
    def asked_for_sampler(self) -> float:
        """What Ray is asked for a sampler. Of two that take turns it is the larger part: samplers are placed first, no
        two of them on one GPU, and each leaves room for one learner worker."""
        return round(_FIRST_OF_TWO * max(self.sampler, self.learner), 4) if self.colocate else self.sampler

    @property
    def asked_for_learner(self) -> float:
        """What Ray is asked for a learner worker."""
        if not self.colocate:
            return self.learner
        return round(max(self.sampler, self.learner) - self.asked_for_sampler, 4)


class PlacementSection(BaseModel):
    """On which machines of a cluster Ray puts the processes that compute, in Ray's words; where there is no room for
    that, elsewhere."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    learner: Literal["PACK", "SPREAD"] = "PACK"
    """The learner workers: `PACK` on as few machines as possible, between which weights and gradients travel; `SPREAD`
    over as many as possible."""
    samplers: Literal["DEFAULT", "SPREAD"] = "DEFAULT"
    """The samplers: `DEFAULT` fills half of a machine before it takes the next; `SPREAD` over as many as possible."""


def coordinator_resources() -> dict[str, float]:
    """The coordinator's `.options(**...)`."""
    return {"num_cpus": _SMALL_CPUS, "num_gpus": 0}


def store_resources() -> dict[str, float]:
    """The weight store's `.options(**...)`."""
    return {"num_cpus": _SMALL_CPUS, "num_gpus": 0}


def grader_resources() -> dict[str, float]:
    """A grader's `.options(**...)`."""
    return {"num_cpus": _SMALL_CPUS, "num_gpus": 0}


def sampler_resources(device: str, share: float = 1.0) -> dict[str, float]:
    """A sampler's `.options(**...)`; on `cuda` it has its share of a GPU and a core that feeds it."""
    return {"num_cpus": 1, "num_gpus": share} if device == "cuda" else {"num_cpus": _COMPUTE_CPUS, "num_gpus": 0}


def learner_resources(device: str, share: float = 1.0) -> dict[str, float]:
    """A learner worker's `resources_per_worker`, by the names that Ray Train uses."""
    return {"CPU": 1, "GPU": share} if device == "cuda" else {"CPU": _COMPUTE_CPUS}


def num_gpus_for(shares: Iterable[float]) -> int:
    """GPUs that shares of them take, the largest placed first, each where there is room."""
    left: list[float] = []
    for share in sorted(shares, reverse=True):
        place = next((index for index, free in enumerate(left) if share <= free + _GPU_TOLERANCE), None)
        if place is None:
            left.append(1.0 - share)
        else:
            left[place] -= share
    return len(left)
