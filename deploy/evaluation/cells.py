"""Cells of an evaluation's table: a task at a length and a schedule, made of what the command line says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deploy.errors import UserError
from deploy.grading.tasks import task_config
from deploy.recipe.recipe import Recipe
from deploy.requests.defaults import Defaults
from deploy.requests.parameters import Values, sampler_names, to_params
from deploy.requests.refusals import refusal_of
from learner.model.config import TransformerConfig
from rewards import TaskConfig
from rewards.first_d1 import evaluation as first_d1
from rewards.problem import Rules
from rollout.request import PARAMETER_OF, SamplingParams

_SHARE, _COUNT = re.compile(r"\d{0,9}\.?\d{1,9}"), re.compile(r"\d{1,9}")
_HALF = "0.5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """How often a problem is asked."""

    num_samples: int = 1
    """Completions of each problem."""
    temperature: float = 0.0
    """Of the draws; 0 takes the likeliest token."""
    seed: int = 0
    """Keys the draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the command line asks for; None where it leaves a thing out."""

    tasks: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    schedules: tuple[str, ...] | None = None
    block_length: int | None = None
    num_problems: int | None = None
    protocol: Rules = "fixed"
    fields: tuple[str, ...] = ()
    """Fields of the tasks: `TASK.KEY=VALUE`."""
    sampled: Sampled = Sampled()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One row of the table."""

    task: TaskConfig
    """Whose held-out problems are asked."""
    protocol: Rules
    """By whose rules: `d1` also asks as the first d1 does."""
    params: SamplingParams
    """How a completion is denoised."""
    num_problems: int | None
    """How many are asked; None: all that there are of data, else as many as `problems.py` says."""
    sampled: Sampled
    """How often each."""

    @property
    def name(self) -> str:
        """Of its file."""
        rules = "" if self.protocol == "fixed" else f".{self.protocol}"
        drawn = f".{self.sampled.num_samples}-at-{self.sampled.temperature:g}" if self.sampled.temperature else ""
        schedule = re.sub(r"[^A-Za-z0-9.]+", "-", self.params.schedule_name)
        return f"{self.task.name}{rules}.{self.params.gen_length}.{schedule}{drawn}"

    def facts(self) -> dict[str, Any]:
        """What its answers hang on, as JSON."""
        return {
            "task": self.task.model_dump(mode="json"),
            "protocol": self.protocol,
            "params": self.params.model_dump(mode="json"),
            "num_problems": self.num_problems,
            "num_samples": self.sampled.num_samples,
            "seed": self.sampled.seed,
        }


def cells_of(asked: Asked, run: Recipe | None, policy: TransformerConfig) -> list[Cell]:
    """A cell for each task, length and schedule, in that order.

    Args:
        asked: what the command line says.
        run: the recipe of the checkpoint's run, which says what is left out; None where it is of no run.
        policy: the shape of what is evaluated.

    Raises:
        UserError: a task, field, length or schedule that there is not, or that do not fit each other.
    """
    configs = _task_configs(asked, run)
    own = None if run is None else run.task.name
    params = _d1_params(asked) if asked.protocol == "d1" else _params(asked, run, policy)
    # The first d1 asks as many as it asks.
    counted = None if run is None or asked.protocol == "d1" else run.evaluation.num_problems
    cells = [
        Cell(
            task=config,
            protocol=asked.protocol,
            params=each,
            num_problems=asked.num_problems or (counted if config.name == own else None),
            sampled=asked.sampled,
        )
        for config in configs
        for each in params
    ]
    # What is named twice, as in 0.5 and steps=5 of ten slots, is asked once.
    return list({cell.name: cell for cell in cells}.values())


def _task_configs(asked: Asked, run: Recipe | None) -> list[TaskConfig]:
    if asked.tasks is None and run is None:
        raise UserError("say which tasks, as in --tasks countdown,sudoku; `d1 tasks` lists them")
    names = asked.tasks or ((run.task.name,) if run is not None else ())
    if strays := [text for text in asked.fields if text.partition(".")[0] not in names]:
        raise UserError(f"{strays[0]} is a field of none of the tasks {', '.join(names)}; write TASK.KEY=VALUE")
    return [_task_config(name, asked, run) for name in dict.fromkeys(names)]


def _task_config(name: str, asked: Asked, run: Recipe | None) -> TaskConfig:
    """A run's own task is asked as the run asks it; d1's rules pose it in words of their own."""
    fields = [text.partition(".")[2] for text in asked.fields if text.startswith(f"{name}.")]
    rules: list[str] = []
    if asked.protocol == "d1":
        if name not in first_d1.TASKS:
            raise UserError(f"the first d1 evaluates {', '.join(first_d1.TASKS)}; leave out {name}, or --protocol d1")
        rules = ["protocol=d1", "prompt=compact"]
    # Its split too: what it trained on is not to be asked.
    is_own = run is not None and run.task.name == name
    given = run.task.model_dump(mode="json", exclude={"name"}, exclude_unset=True) if run and is_own else {}
    return task_config(name, [*fields, *rules], given)


def _d1_params(asked: Asked) -> list[SamplingParams]:
    if asked.schedules is not None or asked.block_length is not None:
        raise UserError(
            "--protocol d1 denoises as the first d1 does: blocks of 32, half as many steps as slots; "
            "leave out --schedules and --block-length"
        )
    if asked.sampled.temperature:
        raise UserError("--protocol d1 takes the likeliest token; leave out --samples and --temperature")
    block = first_d1.BLOCK_LENGTH
    if strays := [length for length in asked.lengths or () if length % block]:
        raise UserError(f"--protocol d1 denoises in blocks of {block}; --lengths {strays[0]} is no multiple of {block}")
    # It fills the whole canvas: nothing ends a text.
    fixed = {"block_length": block, "temperature": 0.0, "stop_ids": ()}
    return [
        _checked({"gen_length": length, "steps": length // 2, **fixed}, f"--lengths {length}")
        for length in asked.lengths or first_d1.LENGTHS
    ]


def _params(asked: Asked, run: Recipe | None, policy: TransformerConfig) -> list[SamplingParams]:
    """Each length at each schedule; a run's own where neither is given."""
    drawn = {"temperature": asked.sampled.temperature}
    if run is not None and (asked.lengths or asked.schedules or asked.block_length) is None:
        return [params.model_copy(update=drawn) for params in run.evaluated_params]
    if run is None:
        defaults = Defaults.of_policy(policy.max_sequence_length, policy.block_length)
    else:
        defaults = Defaults.of_run(run.evaluated_params[0])
    block = {} if asked.block_length is None else {"block_length": asked.block_length}
    is_one_block = not block and run is not None and run.evaluated_params[0].num_blocks == 1
    found = []
    for length in asked.lengths or (defaults.complete([block], 0)["gen_length"],):
        shape = {"gen_length": length, **({"block_length": length} if is_one_block else block)}
        block_length = defaults.complete([shape], 0)["block_length"]
        for text in asked.schedules or (_HALF,):
            values = defaults.complete([shape, _schedule(text, length, block_length), drawn], 0)
            found.append(_checked(values, f"--lengths {length} --schedules {text}"))
    return found


def _schedule(text: str, gen_length: int, block_length: int) -> Values:
    """`0.5`: half as many steps as slots. `steps=9`, `threshold=0.9`, ...: that parameter."""
    name, _, value = text.partition("=")
    if _SHARE.fullmatch(text) and 0 < float(text) <= 1:
        num_blocks = max(1, gen_length // max(1, block_length))
        return {"schedule": "quota", "steps": num_blocks * max(1, round(float(text) * block_length))}
    if name == "steps" and _COUNT.fullmatch(value):
        return {"schedule": "quota", "steps": int(value)}
    if name in PARAMETER_OF.values() and _SHARE.fullmatch(value):
        return {name: float(value)}
    raise UserError(
        f"--schedules {text} is no schedule; write a share of the slots as in 0.5, or steps=9, "
        f"{', '.join(f'{name}=0.9' for name in PARAMETER_OF.values())}"
    )


def _checked(values: Values, place: str) -> SamplingParams:
    try:
        return to_params(values)
    except ValidationError as error:
        refusal = refusal_of(error, SamplingParams, sampler_names({"block_length": "--block-length"}))
        raise UserError(f"{place}: {refusal}") from error
