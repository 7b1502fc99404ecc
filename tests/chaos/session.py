"""A chaos session: a reference run without faults, then runs with faults until all are injected, then the checks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from actors.spec import Phase
from benchmarks.processes.run_processes import Role
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from tests.chaos.checker import CheckedRecipe, violations
from tests.chaos.faults import Fault, Platform, Target, schedule
from tests.chaos.faulty_run import ChaosPlan, FaultyRun, Log, run_reference
from tests.chaos.platforms import Cluster
from tests.chaos.record import RunRecord, read_history
from tests.simulated.machine_pair import MachinePair

RECIPE = Path(__file__).parents[2] / "recipes" / "chaos.yaml"
_REFERENCE = "reference"
_DISK_BYTES = 256 << 20
_PROGRESS_TIMEOUT_S = 180.0
_LEFTOVER_TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """Options of the command line."""

    overrides: tuple[str, ...]
    """Changes to the recipe."""
    num_faults: int
    """Number of faults."""
    seed: int
    """Seed of their schedule."""
    targets: Collection[Target]
    """Targets of the faults."""
    on_machines: bool = False
    """Whether all runs are on two machines."""
    out: Path
    """New directory of the runs and the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionResult:
    """Result of a session."""

    records: tuple[RunRecord, ...]
    """The runs with faults."""
    skipped: tuple[str, ...]
    """Faults that were not injected, and why."""
    violations: tuple[str, ...]
    """Violated guarantees."""


def run_session(options: SessionOptions, log: Log) -> SessionResult:
    """Run a session. Ctrl-C ends it early and keeps the completed runs."""
    recipe = load_recipe(RECIPE, list(options.overrides))
    options.out.mkdir(parents=True)
    plan = _plan(recipe, options)
    log(f"the reference run took {run_reference(_REFERENCE, options.out, plan):.0f} s")
    reference, checked = read_history(options.out / _REFERENCE), _checked(recipe)
    records: list[RunRecord] = []
    found: list[str] = []
    faults = schedule(options.num_faults, options.seed, options.targets, on_machines=options.on_machines)
    reason = "not possible when it was its turn"
    try:
        for queue, platform in _queues(faults):
            for number in count(len(records) + 1):
                before, name = len(queue), f"faulty-{number}"
                log(f"{name}: a run on {platform}, {before} faults left")
                record = FaultyRun(name, platform, options.out, plan, log).run(queue)
                records.append(record)
                found += (new := violations(checked, reference, record))
                log(f"{name}: {len(record.injected)} faults, {len(record.launches)} launches, {len(new)} violations")
                for what in new:
                    log(f"violation: {what}")
                # A run too short for its next fault would be repeated for ever.
                if not queue or len(queue) == before:
                    break
    except KeyboardInterrupt:
        reason = "the session was stopped"
    injected = {injected.fault for record in records for injected in record.injected}
    skipped = [f"fault {fault.number}, {fault}: {reason}" for fault in faults if fault not in injected]
    return SessionResult(records=tuple(records), skipped=tuple(skipped), violations=tuple(found))


def _queues(faults: list[Fault]) -> list[tuple[deque[Fault], Platform]]:
    """Return the faults of each platform that this machine has."""
    queues = [(deque(fault for fault in faults if fault.platform is platform), platform) for platform in Platform]
    is_possible = {Platform.CLUSTER: Cluster.is_possible, Platform.TWO_MACHINES: MachinePair.is_possible}
    return [
        (queue, platform)
        for queue, platform in queues
        if queue and (platform not in is_possible or is_possible[platform]())
    ]


def _plan(recipe: Recipe, options: SessionOptions) -> ChaosPlan:
    d1 = str(Path(sys.executable).with_name("d1"))
    return ChaosPlan(
        command=(d1, "train", str(RECIPE), *options.overrides),
        sizes={
            Role.SAMPLER: recipe.rollout.num_samplers,
            Role.GRADER: recipe.grading.num_graders,
            Role.LEARNER: recipe.learner.num_workers,
        },
        checkpoint_every_rounds=recipe.checkpoint_every_rounds,
        progress_timeout_s=_PROGRESS_TIMEOUT_S,
        leftover_timeout_s=_LEFTOVER_TIMEOUT_S,
        disk_bytes=_DISK_BYTES,
    )


def _checked(recipe: Recipe) -> CheckedRecipe:
    checkpoints = (Phase.SFT, f"{Phase.RL}-{recipe.learner.num_rounds:06d}")
    return CheckedRecipe(
        num_rounds=recipe.learner.num_rounds,
        groups_per_round=recipe.learner.groups_per_round,
        group_size=recipe.learner.group_size,
        max_staleness=recipe.learner.max_staleness,
        checkpoints=(*checkpoints, Phase.CONTROL) if recipe.control.enabled else checkpoints,
    )
