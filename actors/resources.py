"""Ray resource requests of a run's actors, and the recipe sections for GPU shares and placement.

On CPU a run's processes share cores, so they request fractions: a laptop with two logical CPUs places two samplers, two
learner workers and everything around them. The embedded registry and Ray Train's controller request none, a replica of
the service next to none. On GPUs each sampler and learner worker has one, or the share of one that the recipe's `gpus`
sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

WeightTransport = Literal["object_store", "nixl", "cuda_ipc"]
OBJECT_STORE: WeightTransport = "object_store"

_SMALL_CPUS = 0.1
_COMPUTE_CPUS = 0.4
# Ray's resolution of resources is 1/10,000.
_GPU_TOLERANCE = 1e-4
_FIRST_OF_TWO = 0.51


class GpuSection(BaseModel):
    """Sharing of GPUs, with `device: cuda`. Ray places shares that add up to at most one on the same GPU where it has
    to, and no process uses more of that GPU's memory than its share."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    colocate: bool = False
    """Put a sampler and a learner worker on the same GPU, where they take turns: while one works, the other has
    released its GPU memory. The two shares need not add up to one then: each applies during its process's turn.
    Requires `learner.max_staleness: 0`, with which they would wait for each other anyway."""
    sampler: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU for each sampler."""
    learner: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU for each learner worker. Less than 1 requires a single worker: NCCL accepts no two ranks on one
    GPU."""
    engine: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a GPU for each engine of the run's service; 0: it computes on the CPU."""

    @property
    def sampler_request(self) -> float:
        """GPU share to request from Ray for a sampler. With `colocate` it is the larger half of the pair's: samplers
        are placed first, no two on one GPU, and each leaves room for one learner worker."""
        return round(_FIRST_OF_TWO * max(self.sampler, self.learner), 4) if self.colocate else self.sampler

    @property
    def learner_request(self) -> float:
        """GPU share to request from Ray for a learner worker."""
        if not self.colocate:
            return self.learner
        return round(max(self.sampler, self.learner) - self.sampler_request, 4)


class PlacementSection(BaseModel):
    """Placement of samplers and learner workers on a cluster's machines, in Ray's terms. The strategies are
    preferences: without room, Ray places them elsewhere."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    learner: Literal["PACK", "SPREAD"] = "PACK"
    """The learner workers: `PACK` on as few machines as possible, as weights and gradients travel between them;
    `SPREAD` over as many as possible."""
    samplers: Literal["DEFAULT", "SPREAD"] = "DEFAULT"
    """The samplers: `DEFAULT` fills half of a machine before it uses the next; `SPREAD` over as many as possible."""
    learner_labels: Mapping[str, str] = {}
    """Labels of the nodes for learner workers, with Ray's conditions: `{pool: h100}`, `{zone: "in(a, b)"}` or
    `{spot: "!true"}`. Nodes get them from `ray start --labels`, KubeRay or Ray itself. Required, unlike the fields
    above: the learner waits for such a node."""
    sampler_labels: Mapping[str, str] = {}
    """The same for samplers."""


def coordinator_resources() -> dict[str, float]:
    """Return the coordinator's `.options(**...)`."""
    return {"num_cpus": _SMALL_CPUS, "num_gpus": 0}


def store_resources() -> dict[str, float]:
    """Return the weight store's `.options(**...)`."""
    return {"num_cpus": _SMALL_CPUS, "num_gpus": 0}


def grader_resources() -> dict[str, float]:
    """Return a grader's `.options(**...)`."""
    return {"num_cpus": _SMALL_CPUS, "num_gpus": 0}


def sampler_resources(device: str, share: float = 1.0) -> dict[str, float]:
    """Return a sampler's `.options(**...)`; on `cuda`, its share of a GPU and a core that feeds it."""
    return {"num_cpus": 1, "num_gpus": share} if device == "cuda" else {"num_cpus": _COMPUTE_CPUS, "num_gpus": 0}


def learner_resources(device: str, share: float = 1.0) -> dict[str, float]:
    """Return a learner worker's `resources_per_worker`, with Ray Train's names."""
    return {"CPU": 1, "GPU": share} if device == "cuda" else {"CPU": _COMPUTE_CPUS}


def num_gpus_for(shares: Iterable[float]) -> int:
    """Count the GPUs that some shares need: first fit, largest share first."""
    left: list[float] = []
    for share in sorted(shares, reverse=True):
        place = next((index for index, free in enumerate(left) if share <= free + _GPU_TOLERANCE), None)
        if place is None:
            left.append(1.0 - share)
        else:
            left[place] -= share
    return len(left)
