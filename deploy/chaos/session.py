"""A session: one undisturbed run, then disturbed ones until every fault has been carried out, then the verdict."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from actors.run_log import is_done
from actors.spec import Phase
from deploy.chaos.faults import Fault, Setting, Target
from deploy.chaos.judge import JudgedRecipe, judge
from deploy.chaos.places import Cluster
from deploy.chaos.record import History, RunRecord, read_history
from deploy.chaos.run import ChaosPlan, DisturbedRun, Say, undisturbed
from deploy.chaos.schedule import schedule
from deploy.errors import RunFailedError, UserError, reason
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe

_REFERENCE = "reference"
_DISK_BYTES = 256 << 20
_LEFTOVER_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the user asked for."""

    recipe_path: Path
    """The recipe."""
    overrides: tuple[str, ...]
    """Changes to it."""
    kills: int
    """How many faults."""
    seed: int
    """Of their schedule."""
    targets: Collection[Target]
    """What they may be done to."""
    reference: Path | None
    """The directory of an undisturbed run; None: one is made first."""
    patience_s: float
    """How long a run may make no progress before it counts as stuck."""
    out: Path
    """Where the runs and the report go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosVerdict:
    """What came of a session."""

    records: tuple[RunRecord, ...]
    """The disturbed runs."""
    skipped: tuple[str, ...]
    """A sentence for each fault that was not carried out."""
    violations: tuple[str, ...]
    """A sentence for each thing that must not be."""


def carry_out(order: Order, say: Say) -> ChaosVerdict:
    """Run a session; of one that Ctrl-C stops, what there is.

    Raises UserError for a recipe whose runs cannot be compared, a reference that is none and a place that cannot be
    made, RunFailedError for a run that fails.
    """
    recipe = load_recipe(order.recipe_path, list(order.overrides))
    _check(recipe, order.recipe_path)
    faults = schedule(order.kills, order.seed, order.targets)
    given = None if order.reference is None else _given_reference(order.reference, recipe)
    try:
        order.out.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot make {order.out}: {reason(error)}; give --out another one") from error
    plan = _plan(recipe, order)
    reference = _made_reference(order, plan, say) if given is None else given
    terms = _terms(recipe)
    skipped: list[str] = []
    records: list[RunRecord] = []
    violations: list[str] = []
    why_not = "not possible when its moment came"
    try:
        for record in _disturbed(order, plan, faults, skipped, say):
            found = judge(terms, reference, record)
            counts = f"{len(record.blows)} faults, {len(record.drives)} times `d1 train`, {len(found)} violations"
            say(f"{record.name}: {counts}")
            records.append(record)
            violations += found
    except KeyboardInterrupt:
        # Hours of a night's session are not lost; the run under way cannot be judged.
        why_not = "the session was stopped"
    skipped += _undone(faults, records, skipped, why_not)
    return ChaosVerdict(records=tuple(records), skipped=tuple(skipped), violations=tuple(violations))


def _disturbed(order: Order, plan: ChaosPlan, faults: list[Fault], skipped: list[str], say: Say) -> Iterator[RunRecord]:
    """The runs that the faults take, one after another; a sentence in `skipped` for each that cannot be carried out."""
    numbers = count(1)
    for setting in Setting:
        left = deque(fault for fault in faults if fault.setting is setting)
        if left and (why := _impossible(setting)):
            skipped += [f"fault {fault.number}, {fault}: {why}" for fault in left]
            left.clear()
        while left:
            before, name = len(left), f"disturbed-{next(numbers)}"
            say(f"{name}: a run on {setting}, {len(left)} faults to come")
            yield DisturbedRun(name, setting, order.out, plan, say).go(left)
            if len(left) == before:
                skipped += [f"fault {fault.number}, {fault}: its run ended before" for fault in left]
                break


def _undone(faults: list[Fault], records: list[RunRecord], skipped: list[str], why: str) -> list[str]:
    """Faults that were not carried out, with why."""
    done = {blow.fault.number for record in records for blow in record.blows}
    said = {fault.number for fault in faults if any(what.startswith(f"fault {fault.number},") for what in skipped)}
    return [f"fault {fault.number}, {fault}: {why}" for fault in faults if fault.number not in done | said]


def _check(recipe: Recipe, path: Path) -> None:
    if recipe.control.enabled and not recipe.control.num_steps:
        raise UserError(
            f"{path}: control.num_steps 0 gives the control the rounds' seconds, and no two runs are alike; "
            "give it steps, or control.enabled=false"
        )
    if not recipe.checkpoint_every_rounds:
        raise UserError(
            f"{path}: checkpoint_every_rounds is 0, and faults between rounds aim at checkpoints; give it 5"
        )
    if recipe.sft.num_steps == 0:
        raise UserError(f"{path}: sft.num_steps is 0, and faults aim at every stage; give it steps")


def _plan(recipe: Recipe, order: Order) -> ChaosPlan:
    d1 = str(Path(sys.executable).with_name("d1"))
    return ChaosPlan(
        command=(d1, "train", str(order.recipe_path), *order.overrides),
        sizes={
            Target.SAMPLER: recipe.rollout.num_samplers,
            Target.GRADER: recipe.grading.num_graders,
            Target.LEARNER: recipe.learner.num_workers,
        },
        checkpoint_every_rounds=recipe.checkpoint_every_rounds,
        patience_s=order.patience_s,
        leftover_s=_LEFTOVER_S,
        disk_bytes=_DISK_BYTES,
    )


def _terms(recipe: Recipe) -> JudgedRecipe:
    phases = (Phase.SFT, f"{Phase.RL}-{recipe.learner.num_rounds:06d}")
    return JudgedRecipe(
        num_rounds=recipe.learner.num_rounds,
        groups_per_round=recipe.learner.groups_per_round,
        group_size=recipe.learner.group_size,
        max_staleness=recipe.learner.max_staleness,
        phases=(*phases, Phase.CONTROL) if recipe.control.enabled else phases,
    )


def _given_reference(directory: Path, recipe: Recipe) -> History:
    began = load_recipe(directory / "recipe.yaml", [])
    places = {"name": recipe.name, "runs_dir": recipe.runs_dir}
    if began.model_copy(update=places) != recipe:
        raise UserError(f"--reference {directory} is a run of another recipe; leave it out to make one")
    history = read_history(directory)
    if not is_done(history.events):
        raise UserError(f"--reference {directory} has not ended; leave it out to make one")
    return history


def _made_reference(order: Order, plan: ChaosPlan, say: Say) -> History:
    say("the undisturbed run, to compare with")
    try:
        events = undisturbed(_REFERENCE, order.out, plan)
    except RuntimeError as error:
        raise RunFailedError(str(error)) from error
    say(f"it took {events[-1]['time_s']:.0f} s")
    return read_history(order.out / _REFERENCE)


def _impossible(setting: Setting) -> str:
    """Why nothing can run there; empty when it can."""
    if setting is Setting.CLUSTER and not Cluster.is_possible():
        return "redis-server is missing (Debian: apt install redis-server)"
    return ""
