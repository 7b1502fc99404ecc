"""The plan of a reproduction: d1's own commands in their order, each with what it needs and leaves.

For each seed and task: the base policy, SFT from it, and the rounds from either; then each of them is evaluated.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from actors.checkpoints.selection import Position, checkpoint_name
from actors.run_log import CHECKPOINTS
from actors.spec import Phase
from deploy.errors import UserError
from deploy.recipe.recipe import Recipe
from deploy.recipe.refusals import first_refusal
from deploy.reproduce.scale import Scale, TaskScale, merged
from learner.algorithms import METHOD

BASE, SFT = "base", "SFT"
# The recipe's own method, for which the table of algorithms has no row.
OWN = "recipe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """A file of unlabelled texts is written."""

    name: str
    recipe: Recipe
    path: Path
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A policy is trained by `d1 sft` or `d1 train`."""

    name: str
    """Of the run."""
    row: str
    """Of the table."""
    task: str | None
    """Of the table; None where it is of all of them."""
    recipe: Recipe
    start_from: str | None
    """The checkpoint that the rounds begin with; None of SFT."""

    @property
    def words(self) -> tuple[str, ...]:
        """What follows `d1`, but for the recipe's file."""
        return ("sft",) if self.start_from is None else ("train", "--from", self.start_from)

    @property
    def checkpoint(self) -> str:
        """What it leaves."""
        phase, rounds = (Phase.SFT, 0) if self.start_from is None else (Phase.RL, self.recipe.learner.num_rounds)
        last = Position(phase=phase, round=rounds, policy_version=0, rl_seconds=0.0)
        return str(self.recipe.run_dir / CHECKPOINTS / checkpoint_name(last))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A policy is evaluated on a task at a length by `d1 eval`."""

    name: str
    row: str
    task: str
    seed: int
    length: int
    words: tuple[str, ...]
    """What follows `d1`."""


Step = Texts | Training | Evaluation


def plan(scale: Scale, out: Path, seeds: Sequence[int], algorithms: Sequence[str]) -> list[Step]:
    """All steps, in an order in which each finds what it needs; whole seeds first, so that a table is there early.

    Raises UserError where a recipe that comes of it cannot be, as with an algorithm that there is not.
    """
    planner = _Planner(scale, out.absolute(), algorithms)
    steps = [step for seed in seeds for name in scale.tasks for step in planner.of(name, seed)]
    # What several tasks share is done with the first.
    return list({step.name: step for step in steps}.values())


def rows(algorithms: Sequence[str]) -> list[str]:
    """The rows of the table: without SFT, then with it, as the first d1's."""
    return [BASE, f"+ {SFT}", *(f"+ {name}" for name in algorithms), *(f"+ {SFT} + {name}" for name in algorithms)]


class _Planner:
    def __init__(self, scale: Scale, out: Path, algorithms: Sequence[str]) -> None:
        self._scale, self._out, self._algorithms = scale, out, algorithms

    def of(self, task: str, seed: int) -> Iterator[Step]:
        """The steps of one task at one seed."""
        of = _Of(name=task, scale=self._scale.tasks[task], seed=seed)
        base = yield from self._base(of)
        yield from self._evaluations(of, BASE, f"{of}.base", base)
        sft = self._sft(of, base)
        yield sft
        yield from self._evaluations(of, sft.row, f"{of}.sft", sft.checkpoint)
        for algorithm in self._algorithms:
            for name, start, row in (
                (f"{of}.{algorithm}", base, f"+ {algorithm}"),
                (f"{of}.sft.{algorithm}", sft.checkpoint, f"+ {SFT} + {algorithm}"),
            ):
                trained = self._rounds(of, algorithm, name, start, row)
                yield trained
                yield from self._evaluations(of, row, trained.name, trained.checkpoint)

    def _base(self, of: _Of) -> Generator[Step, None, str]:
        """Pre-train it, or find it. Returns its checkpoint."""
        pretraining = self._scale.pretraining
        if pretraining is None:
            return str(self._scale.recipe["model"]["checkpoint"])
        path, longest = self._out / "texts" / f"{of}.jsonl", max(of.scale.lengths)
        rollout = merged(self._scale.recipe, of.scale.recipe)["rollout"]
        sft = {
            "data": str(path),
            "num_labels": pretraining.num_texts,
            "num_steps": pretraining.num_steps,
            # On the canvas that SFT and the rounds have.
            "max_tokens": rollout["max_prompt_tokens"] + rollout["sampling"]["gen_length"],
        }
        # A policy takes no longer canvas than it was made for: as long as the longest completion that is evaluated.
        sampling = {"gen_length": longest, "block_length": longest, "num_denoise_steps": -(-longest // 2)}
        changes = {"sft": sft, "rollout": {"sampling": sampling}, "evaluation": {"schedules": None}}
        recipe = self._recipe(of, f"{of}.base", changes)
        yield Texts(name=f"{of}.texts", recipe=recipe, path=path, count=pretraining.num_texts)
        training = Training(name=recipe.name, row=BASE, task=of.name, recipe=recipe, start_from=None)
        yield training
        return training.checkpoint

    def _sft(self, of: _Of, base: str) -> Training:
        is_shared = self._scale.shares_sft
        recipe = self._recipe(of, f"{of.seed}.sft" if is_shared else f"{of}.sft", {"model": {"checkpoint": base}})
        task = None if is_shared else of.name
        return Training(name=recipe.name, row=f"+ {SFT}", task=task, recipe=recipe, start_from=None)

    def _rounds(self, of: _Of, algorithm: str, name: str, start: str, row: str) -> Training:
        settings = self._scale.algorithms.get(algorithm, {})
        if algorithm == OWN:
            recipe = self._recipe(of, name, {"learner": settings})
        else:
            recipe = self._recipe(of, name, {"learner": {"algorithm": algorithm} | settings}, leaves_out=METHOD)
        return Training(name=name, row=row, task=of.name, recipe=recipe, start_from=start)

    def _recipe(self, of: _Of, name: str, changes: dict[str, Any], leaves_out: Sequence[str] = ()) -> Recipe:
        """The scale's recipe for a task with changes; `leaves_out` are settings of the learner that go before these."""
        values = merged(merged(self._scale.recipe, of.scale.recipe), {"task": of.scale.task})
        learner = {key: value for key, value in values["learner"].items() if key not in leaves_out}
        values = merged(values | {"learner": learner}, changes)
        values |= {"name": name, "seed": of.seed, "runs_dir": str(self._out / "runs")}
        try:
            return Recipe.model_validate(values)
        except ValidationError as error:
            refusal, _ = first_refusal(error, Recipe.model_json_schema())
            raise UserError(f"the recipe of {name}: {refusal.sentence}") from error

    def _evaluations(self, of: _Of, row: str, policy: str, checkpoint: str) -> Iterator[Step]:
        task = of.scale
        fields = [f"{of.name}.{key}={_yaml(value)}" for key, value in task.task.items() if key != "name"]
        for length in task.lengths:
            name = f"{policy}.{length}"
            words = ["eval", checkpoint, *fields, "--tasks", of.name, "--lengths", str(length)]
            if self._scale.protocol == "d1":
                words += ["--protocol", "d1"]
            else:
                words += ["--schedules", "0.5", "--block-length", str(length)]
            words += [] if task.num_problems is None else ["--problems", str(task.num_problems)]
            words += ["--out", str(self._out / "evaluations" / name), "--runs-dir", str(self._out / "runs")]
            yield Evaluation(name=name, row=row, task=of.name, seed=of.seed, length=length, words=tuple(words))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Of:
    """A task at a seed."""

    name: str
    scale: TaskScale
    seed: int

    def __str__(self) -> str:
        return f"{self.name}.{self.seed}"


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
