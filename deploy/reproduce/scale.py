"""The scale of a reproduction: which tasks, at which lengths, with which recipes. A YAML file of this folder each."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from actors.whole_file import write_whole
from deploy.errors import UserError
from deploy.recipe.refusals import first_refusal
from deploy.recipe.yaml_text import parse_yaml
from rewards.data.encoding import decoded

_KEPT = "scale.json"
DEFAULT_ALGORITHM = "diffu-grpo"
"""What the first d1 trains with."""


class Pretraining(BaseModel):
    """How a base policy is made where there is none: SFT's loss on unlabelled text (`texts.py`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_texts: PositiveInt
    num_steps: PositiveInt


class TaskScale(BaseModel):
    """One task of the table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lengths: tuple[PositiveInt, ...] = Field(min_length=1)
    """Slots of a completion: the columns."""
    num_problems: PositiveInt | None = None
    """Held-out problems of each cell; None: all that there are of data."""
    task: dict[str, Any]
    """The recipe's section."""
    recipe: dict[str, Any] = {}
    """What its recipes have otherwise than those of the other tasks, section by section."""


class Scale(BaseModel):
    """All of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    """In a sentence, for the head of the report."""
    seeds: tuple[int, ...] = Field(min_length=1)
    """One training of each row for each."""
    protocol: str = "fixed"
    """By whose rules it is evaluated: `d1` for the first d1's."""
    pretraining: Pretraining | None = None
    """How the base policy is made; None: it is `recipe`'s `model.checkpoint`."""
    shares_sft: bool = False
    """Whether SFT is on the same data for all tasks, and so done once for each seed."""
    recipe: dict[str, Any]
    """What all recipes have in common."""
    algorithms: dict[str, dict[str, Any]] = {}
    """The `learner` section of an algorithm, over the recipe's; one that is not here has its paper's settings."""
    tasks: dict[str, TaskScale] = Field(min_length=1)
    """By name, in the order of the table."""


def scale_names() -> list[str]:
    """Those that there are."""
    return sorted(
        file.name.removesuffix(".yaml") for file in files(__package__).iterdir() if file.name.endswith(".yaml")
    )


def read_scale(name: str, sft_data: Path | None = None) -> Scale:
    """A scale by its name or its file, with the file that SFT trains on where the scale's tasks do not bring it.

    Raises UserError where there is none of that name, for a file that is none, and where the file of SFT is missing or
    there is no place for it.
    """
    scale = _read(name)
    if scale.shares_sft != (sft_data is not None):
        raise UserError(
            f"--scale {name} trains SFT on s1K: name it with --sft-data s1k.jsonl (simplescaling/s1K on the hub)"
            if scale.shares_sft
            else f"--scale {name} trains SFT on its tasks' own labels; leave out --sft-data"
        )
    data = {"sft": {"data": str(sft_data.absolute())}} if sft_data is not None else {}
    return scale.model_copy(update={"recipe": merged(scale.recipe, data)})


def keep(scale: Scale, out: Path) -> None:
    """Write into a folder which scale it is of. Raises UserError where it is of another: its numbers would mix."""
    path, text = out / _KEPT, scale.model_dump_json(indent=1, exclude={"seeds"}) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{out} has a reproduction at another scale, which {path} describes; take another --out")
    write_whole(path, text)


def _read(name: str) -> Scale:
    path = Path(name) if Path(name).suffix == ".yaml" else files(__package__).joinpath(f"{name}.yaml")
    try:
        return Scale.model_validate(parse_yaml(decoded(path.read_bytes())))
    except OSError as error:
        names = ", ".join(scale_names())
        raise UserError(f"--scale {name} is none that there is; take one of {names}, or a .yaml file") from error
    except ValidationError as error:
        refusal, _ = first_refusal(error, Scale.model_json_schema())
        raise UserError(f"--scale {name}: {refusal.sentence}") from error
    except ValueError as error:
        raise UserError(f"--scale {name} is not YAML: {error}") from error


def merged(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Sections of both; what both have, `upper` says."""
    result = dict(lower)
    for key, value in upper.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
