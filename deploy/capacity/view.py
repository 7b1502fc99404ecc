"""Text views of a capacity plan (`d1 plan`), and of what a recipe needs against what is available (`--dry-run`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from deploy.capacity.available import Resources
from deploy.capacity.memory import ProcessMemory
from deploy.capacity.needs import Needs
from deploy.machine import free_bytes
from deploy.printing import counted, duration, gigabytes
from deploy.recipe.overrides import resolved_yaml
from deploy.recipe.recipe import Recipe

if TYPE_CHECKING:
    # It imports torch, which a dry run for CPUs does not need.
    from deploy.capacity.plan import GpuSplit, Plan

_MOST_SPLITS = 6


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan."""
    console.print(Group(*(_memory(process, plan) for process in plan.processes), _splits(plan)))
    for line in _words(plan):
        # Not wrapped, so that commands can be copied.
        console.print(line, soft_wrap=True)


def _memory(process: ProcessMemory, plan: Plan) -> RenderableType:
    of = "" if process.share == 1 else f"{process.share:g} of "
    table = Table(
        title=f"{process.label[:1].upper()}{process.label[1:]} on {of}one {plan.kind.name}", title_justify="left"
    )
    table.add_column("what")
    table.add_column("GB", justify="right")
    table.add_column("reduced by")
    for part in process.parts:
        table.add_row(part.name, f"{part.num_bytes / 1e9:.2f}", part.helps)
    table.add_section()
    table.add_row("total, at least", f"{process.num_bytes / 1e9:.2f}")
    table.add_row("available", f"{process.share * plan.kind.memory_bytes / 1e9:.2f}")
    return table


def _splits(plan: Plan) -> RenderableType:
    table = Table(title=f"A round on {counted(plan.num_gpus, 'GPU')}", title_justify="left")
    for name in ("samplers", "learner workers", "sampling, s", "learning, s", "a round, s", "bottleneck"):
        table.add_column(name, justify="left" if name == "bottleneck" else "right")
    for split in plan.splits[:_MOST_SPLITS]:
        bottleneck = "sampling" if split.sampling_s >= split.learning_s else "learning"
        fits = bottleneck if split.why_not is None else "does not fit"
        numbers = (split.sampling_s, split.learning_s, split.round_s)
        style = "bold" if split is plan.best else None
        row = (str(split.num_samplers), str(split.num_workers), *(f"{number:.3g}" for number in numbers), fits)
        table.add_row(*row, style=style)
    return table


def _words(plan: Plan) -> list[Text]:
    best = plan.best
    words = f"Does not fit: {plan.splits[0].why_not}." if best is None else f"Best: {_override(best, plan)}"
    left_out = len(plan.splits) - _MOST_SPLITS
    more = [] if left_out <= 0 else [Text(f"{counted(left_out, 'slower split')} not shown.", style="dim")]
    derived = (
        f"All numbers are derived, not measured: {plan.sampling_flops / 1e15:.3g} PFLOP of sampling and "
        f"{plan.learning_flops / 1e15:.3g} PFLOP of learning per round (canvases of a completion in "
        f"an inner update: {plan.learning_canvases:.3g}), at the utilization that an H200 "
        f"reached, of {plan.kind.flop_per_s / 1e12:g} TFLOP/s; full canvases; without grading and loading."
    )
    more.append(Text(_beside_rounds(plan)))
    if best is not None and best.num_gpus < plan.num_gpus:
        idle = plan.num_gpus - best.num_gpus
        more.append(Text(f"{counted(idle, 'GPU')} would be idle: the round is too small to split further."))
    if (other := plan.if_colocated) is not None and (best is None or other.round_s < best.round_s):
        words_of_other = f"{_numbers(other)} gpus.colocate=true"
        more.append(Text(f"Colocated on the same GPUs, a round takes {other.round_s:.3g} s: {words_of_other}"))
    if plan.is_short_of_groups:
        more.append(Text("More samplers would be idle: a round has no more groups (learner.groups_per_round)."))
    return [*more, Text(words, style="bold red" if best is None else "bold"), Text(derived, style="dim")]


def _beside_rounds(plan: Plan) -> str:
    """Describe the times of phases other than rounds."""
    phases = {"a step of SFT": plan.sft_step_s, "an evaluation": plan.evaluation_s, "publishing": plan.publishing_s}
    found = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items() if seconds is not None)
    return f"Other phases, with the first split: {found}."


def _override(best: GpuSplit, plan: Plan) -> str:
    words = f"device=cuda {_numbers(best)}"
    sampler, learner = plan.processes
    if plan.is_colocated:
        words += " gpus.colocate=true"
    elif plan.has_other_shares:
        words += f" 'gpus={{sampler: {sampler.share:g}, learner: {learner.share:g}}}'"
    return words


def _numbers(split: GpuSplit) -> str:
    return f"rollout.num_samplers={split.num_samplers} learner.num_workers={split.num_workers}"


def print_dry_run(recipe: Recipe, needs: Needs, available: Resources, problems: Sequence[str]) -> None:
    """Print the resolved recipe, what it needs against what is available, and the problems."""
    console = Console()
    text = resolved_yaml(recipe)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    else:
        # Plain YAML: the output up to the table can be piped into a file and used as a recipe.
        console.print(Text(text), soft_wrap=True)
    table = Table("resource", "the recipe needs", f"{available.where} has")
    table.add_row("CPUs", f"{needs.cpus:g}", f"{available.cpus:g}")
    table.add_row("GPUs", str(needs.gpus), str(available.gpus))
    table.add_row("memory", f"{gigabytes(needs.memory_bytes)} or more", gigabytes(available.memory_bytes))
    table.add_row(
        "object store of one machine", gigabytes(needs.object_store_bytes), gigabytes(available.object_store_bytes)
    )
    table.add_row(
        "disk for checkpoints", f"up to {gigabytes(needs.disk_bytes)}", gigabytes(free_bytes(recipe.run_dir.parent))
    )
    console.print(table)
    for problem in problems:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    if not problems:
        console.print("No problems found. Nothing was started or written.")
