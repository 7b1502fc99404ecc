"""Elastic scaling of a run under way: `d1 scale` adds and removes samplers, graders and engines.

The driver owns the actors of a run, so it starts new ones. The coordinator adds them to its pools, and retires surplus
ones after their current work unit. If there is no room for an actor yet, Ray's autoscaler sees its resource request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from actors.run_log import Event
from actors.spec import RunSpec
from deploy.capacity.available import resources_of
from deploy.capacity.needs import needs_of
from deploy.errors import reason
from deploy.job.background import in_background
from deploy.job.preflight import resource_problems
from deploy.printing import counted
from deploy.program import program
from deploy.recipe.recipe import Recipe
from deploy.runs.scale_request import KINDS, Kind, ScaleAnswer, ScaleRequest, read_request, withdraw, write_answer

if TYPE_CHECKING:
    from actors.cluster import RunActors

_POLL_S = 0.5
_CALL_TIMEOUT_S = 60.0


class Scaler:
    """Current numbers of actors of a run by kind, and the means to change them."""

    def __init__(
        self, recipe: Recipe, spec: RunSpec, actors: RunActors, scale_engines: Callable[[int], None] | None
    ) -> None:
        """Start with the recipe's numbers. `scale_engines` is None if the run has no service."""
        self._recipe, self._spec, self._actors, self._scale_engines = recipe, spec, actors, scale_engines
        self.sizes: dict[Kind, int] = {
            "samplers": spec.rollout.num_samplers,
            "graders": recipe.grading.num_graders,
            "engines": recipe.service.num_replicas if scale_engines else 0,
        }
        self._next_index = dict(self.sizes)
        self.started: list[Any] = []
        """The actors that were started here."""

    def answer(self, request: ScaleRequest) -> ScaleAnswer:
        """Carry out a request, and return the answer. Never raises: the run must continue, whatever Ray raises."""
        try:
            return self._carry_out(request)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return ScaleAnswer(id=request.id, refusal=f"the run could not be scaled: {lines[-1]}")

    def _carry_out(self, request: ScaleRequest) -> ScaleAnswer:
        """Carry out a request, or refuse all of it if it does not fit. An error midway undoes what was done."""
        wanted = self.sizes | request.sizes
        if refusal := self._why_not(request, wanted):
            return ScaleAnswer(id=request.id, refusal=refusal)
        changes = {kind: (self.sizes[kind], wanted[kind]) for kind in KINDS if kind in request.sizes}
        begun: list[Kind] = []
        try:
            for kind, (before, after) in changes.items():
                if before != after:
                    begun.append(kind)
                    self._scale(kind, after)
        except Exception:
            # A call that timed out may have taken effect, so the last kind is undone too.
            for kind in reversed(begun):
                with suppress(Exception):
                    self._scale(kind, changes[kind][0])
            raise
        return ScaleAnswer(id=request.id, changes=changes, notes=tuple(self._notes(changes)))

    def _scale(self, kind: Kind, size: int) -> None:
        if kind == "engines":
            assert self._scale_engines is not None, "a run without a service is refused"
            self._scale_engines(size)
        else:
            self._scale_pool(kind, size)
        self.sizes[kind] = size

    def _scale_pool(self, kind: Kind, size: int) -> None:
        import ray

        from actors.cluster import start_grader, start_sampler

        # Names are never reused: the previous actor of a name may still be shutting down.
        indices = range(self._next_index[kind], self._next_index[kind] + max(0, size - self.sizes[kind]))
        self._next_index[kind] += len(indices)
        if kind == "samplers":
            added = dict(start_sampler(self._spec, self._actors.store, index) for index in indices)
        else:
            added = dict(start_grader(self._spec, index) for index in indices)
        try:
            scale = self._actors.coordinator.scale.remote(kind.removesuffix("s"), size, added)
            ray.get(scale, timeout=_CALL_TIMEOUT_S)
        except Exception:
            for actor in added.values():
                ray.kill(actor)
            raise
        self.started += added.values()

    def _why_not(self, request: ScaleRequest, wanted: dict[Kind, int]) -> str:
        if "engines" in request.sizes and self._scale_engines is None:
            return f"engines: this run has no service; `{program()} train --serve` starts one with it"
        if "engines" in request.sizes and self._recipe.service.max_replicas is not None:
            return "engines: Ray Serve's autoscaler chooses their number (service.max_replicas)"
        if "samplers" in request.sizes and self._spec.gpus.colocate:
            return "samplers: each shares a GPU with a learner worker (gpus.colocate), so their number is fixed"
        if all(wanted[kind] <= self.sizes[kind] for kind in KINDS):
            return ""
        recipe, available = self._with(wanted), resources_of(os.environ.get("RAY_ADDRESS"))
        needs = needs_of(recipe, serve=self._scale_engines is not None, num_machines=available.num_machines)
        return next(resource_problems(recipe, needs, available), "")

    def _with(self, sizes: dict[Kind, int]) -> Recipe:
        """Return the recipe with these numbers of actors, to compute what it needs."""
        recipe = self._recipe
        return recipe.model_copy(
            update={
                "rollout": recipe.rollout.model_copy(update={"num_samplers": sizes["samplers"]}),
                "grading": recipe.grading.model_copy(update={"num_graders": sizes["graders"]}),
                "service": recipe.service.model_copy(update={"num_replicas": max(1, sizes["engines"])}),
            }
        )

    def _notes(self, changes: dict[Kind, tuple[int, int]]) -> Iterator[str]:
        _, samplers = changes.get("samplers", (0, 0))
        work_units = self._recipe.work_units_per_round * (self._recipe.learner.max_staleness + 1)
        if samplers > work_units > 0:
            yield (
                f"the rounds of this recipe have {counted(work_units, 'work unit')} at a time, so that "
                f"{counted(samplers - work_units, 'sampler')} will be idle except in evaluations; a recipe with "
                "a smaller rollout.batch_size has more"
            )


@contextmanager
def scaling(
    recipe: Recipe,
    spec: RunSpec,
    actors: RunActors,
    on_event: Callable[[Event], None],
    scale_engines: Callable[[int], None] | None,
) -> Iterator[None]:
    """Carry out `d1 scale` requests from a background thread until the block ends; then kill the actors added."""
    import ray

    withdraw(spec.run_dir)
    scaler = Scaler(recipe, spec, actors, scale_engines)

    def follow(ended: threading.Event) -> None:
        while not ended.wait(_POLL_S):
            if (request := read_request(spec.run_dir)) is not None:
                try:
                    write_answer(spec.run_dir, scaler.answer(request))
                except OSError as error:
                    on_event({"event": "status", "what": f"`d1 scale` was not answered: {reason(error)}"})
                    withdraw(spec.run_dir)

    try:
        # Two calls and their undoing.
        with in_background(follow, "d1-scale", 4 * _CALL_TIMEOUT_S):
            yield
    finally:
        for actor in scaler.started:
            # Those that have left already are not affected.
            ray.kill(actor)
