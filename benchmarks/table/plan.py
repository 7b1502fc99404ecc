"""Plan of the results table: its training and evaluation commands in order of dependency.

For each seed and task it has the base policy, SFT from it, and RL from either. Each policy is evaluated at each length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints.selection import Position, checkpoint_name
from actors.run_log import CHECKPOINTS, is_done, read_events
from actors.spec import Phase
from benchmarks.table.cells import Place
from benchmarks.table.scales import RECIPES, Scale, TableTask
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe

BASE, SFT = "base", "SFT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A run of `d1 sft` or `d1 train`."""

    name: str
    """Name of the run."""
    words: tuple[str, ...]
    """Arguments of `d1`."""
    run_dir: Path
    """Folder of the run."""
    checkpoint: str
    """Checkpoint that it writes."""
    needs: str
    """Checkpoint that it starts from. Empty if there is none."""

    @property
    def is_done(self) -> bool:
        """Whether the run is complete."""
        return is_done(read_events(self.run_dir))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Evaluation of one cell of the table, by `d1 eval`."""

    name: str
    """Name of the folder of its answers."""
    place: Place
    """Cell of the table."""
    words: tuple[str, ...]
    """Arguments of `d1`."""
    out: Path
    """Folder of its answers."""
    needs: str
    """Checkpoint to evaluate."""
    trained_by: tuple[str, ...]
    """Training runs from the base to the checkpoint."""


Step = Training | Evaluation


def rows(methods: Sequence[str]) -> list[str]:
    """List the rows of the table: without SFT, then with it."""
    return [BASE, f"+ {SFT}", *(f"+ {name}" for name in methods), *(f"+ {SFT} + {name}" for name in methods)]


def plan(
    scale: Scale,
    out: Path,
    *,
    tasks: Sequence[str],
    seeds: Sequence[int],
    methods: Sequence[str],
    changes: Sequence[str] = (),
) -> list[Step]:
    """Make all steps, grouped by seed, and within a seed by task.

    `changes` are overrides for all recipes. Raises UserError if a recipe cannot be read or one of `methods` is unknown.
    """
    steps = [
        step
        for seed in seeds
        for task in tasks
        for step in _OfTask(scale, task, seed, out.absolute(), tuple(changes)).steps(methods)
    ]
    # SFT that several tasks share runs with the first of them.
    return list({step.name: step for step in steps}.values())


def remaining(steps: Sequence[Step], done: Collection[Place]) -> list[Step]:
    """Return the missing evaluations, and the training runs that they and unfinished training runs depend on."""
    needed: set[str] = set()
    found: list[Step] = []
    for step in reversed(steps):
        if step.place not in done if isinstance(step, Evaluation) else step.checkpoint in needed:
            found.append(step)
            if isinstance(step, Evaluation) or not step.is_done:
                needed.add(step.needs)
    return found[::-1]


class _OfTask:
    def __init__(self, scale: Scale, task: str, seed: int, out: Path, changes: tuple[str, ...]) -> None:
        self._scale, self._task, self._seed, self._out = scale, task, seed, out
        self._of: TableTask = scale.tasks[task]
        self._name = f"{task}.{seed}"
        self._changes = changes
        # The plan depends on these values, so a user's overrides cannot replace them.
        self._fixed = (f"seed={seed}", f"runs_dir={out / 'runs'}", "control.enabled=false")

    def steps(self, methods: Sequence[str]) -> Iterator[Step]:
        base, made_by = self._base()
        yield from made_by
        yield from self._evaluations(BASE, f"{self._name}.base", base, ())
        name = f"{self._seed}.sft" if self._scale.shares_sft else f"{self._name}.sft"
        sft = self._training(name, fixed=(f"model.checkpoint={base}",), needs=base)
        yield sft
        yield from self._evaluations(f"+ {SFT}", f"{self._name}.sft", sft.checkpoint, (sft.name,))
        for method in methods:
            changes = self._scale.methods.get(method, (f"learner.algorithm={method}",))
            for name, row, start, before in (
                (f"{self._name}.{method}", f"+ {method}", base, ()),
                (f"{self._name}.sft.{method}", f"+ {SFT} + {method}", sft.checkpoint, (sft.name,)),
            ):
                rounds = self._training(name, changes, needs=start, is_rounds=True)
                yield rounds
                yield from self._evaluations(row, name, rounds.checkpoint, (*before, name))

    def _base(self) -> tuple[str, list[Training]]:
        if self._scale.base is None:
            return str(self._recipe().model.checkpoint), []
        # Train with the longest evaluated canvas: a policy cannot run longer ones than it was made for.
        longest = max(self._of.lengths)
        sampling = f"rollout.sampling={{gen_length: {longest}, block_length: {longest}, num_denoise_steps: {longest}}}"
        made = self._training(f"{self._name}.base", self._scale.base, fixed=(sampling,), needs="")
        return made.checkpoint, [made]

    def _recipe(self) -> Recipe:
        return load_recipe(RECIPES / self._of.recipe, (*self._of.overrides, *self._changes))

    def _training(
        self,
        name: str,
        changes: tuple[str, ...] = (),
        *,
        fixed: tuple[str, ...] = (),
        needs: str,
        is_rounds: bool = False,
    ) -> Training:
        path = RECIPES / self._of.recipe
        overrides = (*self._of.overrides, *changes, *self._changes, *self._fixed, *fixed, f"name={name}")
        recipe = load_recipe(path, overrides)
        command = ("train", "--from", needs) if is_rounds else ("sft",)
        phase, num_rounds = (Phase.RL, recipe.learner.num_rounds) if is_rounds else (Phase.SFT, 0)
        last = Position(phase=phase, round=num_rounds, policy_version=0, rl_seconds=0.0)
        return Training(
            name=name,
            words=(*command, str(path), *overrides),
            run_dir=recipe.run_dir,
            checkpoint=str(recipe.run_dir / CHECKPOINTS / checkpoint_name(last)),
            needs=needs,
        )

    def _evaluations(self, row: str, policy: str, checkpoint: str, runs: tuple[str, ...]) -> Iterator[Evaluation]:
        task = self._recipe().task.model_dump(mode="json", exclude_defaults=True)
        fields = [f"{self._task}.{key}={_yaml(value)}" for key, value in task.items() if key != "name"]
        for length in self._of.lengths:
            out = self._out / "evaluations" / f"{policy}.{length}"
            words = ["eval", checkpoint, *fields, "--tasks", self._task, "--lengths", str(length)]
            words += self._scale.evaluation
            words += [] if self._of.num_problems is None else ["--problems", str(self._of.num_problems)]
            words += ["--out", str(out), "--runs-dir", str(self._out / "runs")]
            yield Evaluation(
                name=f"{policy}.{length}",
                place=Place(task=self._task, row=row, length=length, seed=self._seed),
                words=tuple(words),
                out=out,
                needs=checkpoint,
                trained_by=runs,
            )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
