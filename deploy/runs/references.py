"""Resolution of command-line references: a run by name or path, a checkpoint by path, or a hub model."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from actors.run_log import CHECKPOINTS, METRICS, RECIPE
from deploy.errors import UserError
from deploy.program import program
from deploy.runs.listing import run_names
from learner.model.storage.throughput import ReportProgress

if TYPE_CHECKING:
    from deploy.recipe.recipe import Recipe

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_BEST, _LAST = "best", "last"
_LEAST_LIKENESS = 0.5


def find(reference: str, runs_dir: Path) -> Path:
    """Find the directory of the run or checkpoint that a user names; of a run its own, not a link such as `latest`.

    Args:
        reference: a run's name in `runs_dir` or its path; a checkpoint's path, relative to the working directory or
            to `runs_dir`, or RUN/CHECKPOINT, where RUN/last is the newest and RUN/best solves most validation
            problems; or a hub id, which is downloaded if it is not on this machine yet.
        runs_dir: the directory of runs.

    Raises:
        UserError: there is none; the message suggests the closest name.
        ValueError: the hub does not provide it.
    """
    if (found := _find_here(reference, runs_dir)) is not None:
        return found
    # A hub id has a slash, and the hub's library is slow to import.
    if "/" in reference and _parent_run(reference, runs_dir) is None and Path(reference).parent != runs_dir:
        from learner.model.hub import find_checkpoint, is_hub_id

        if is_hub_id(reference):
            return find_checkpoint(reference)
    raise _not_found_error(reference, runs_dir, f", {reference} is no directory, and no hub id either")


def find_run(reference: str, runs_dir: Path) -> Path:
    """Return the directory of a run, named as for `find`. A checkpoint names the run that it belongs to.

    Raises UserError if there is none.
    """
    found = _find_here(reference, runs_dir)
    if found is not None and (found / METRICS).is_file():
        return found
    if found is None or not _is_checkpoint(found):
        raise _not_found_error(reference, runs_dir, ", and no run directory of that path")
    checkpoints = found.absolute().parent
    if checkpoints.name == CHECKPOINTS and is_run(checkpoints.parent):
        return found.parent.parent
    raise UserError(f"{reference} is a checkpoint by itself, not one of a run; name a run: `{program()} runs ls`")


def find_checkpoint_of(reference: str, runs_dir: Path, say: ReportProgress | None = None) -> Path:
    """Return the directory of a checkpoint; for a run, its newest intact one that can be served.

    `say` reports the throughput of reading it. Raises as `find`.
    """
    found = find(reference, runs_dir)
    if not is_run(found):
        return found
    from deploy.runs.checkpoints import newest_servable

    return newest_servable(found, say).directory


def run_of(checkpoint: Path) -> Path | None:
    """Return the run directory, with a recipe, that a checkpoint's directory belongs to; None for one by itself."""
    checkpoints = checkpoint.resolve().parent
    run_dir = checkpoints.parent
    return run_dir if checkpoints.name == CHECKPOINTS and (run_dir / RECIPE).is_file() else None


def resolve_start(reference: Path) -> Path:
    """Replace a run's directory by its newest intact checkpoint, to start training from; return other paths unchanged.

    Raises UserError if the run has none.
    """
    if not is_run(reference):
        return reference
    from deploy.runs.checkpoints import newest_servable

    return newest_servable(_unlinked(reference)).directory


def with_resolved_checkpoint(recipe: Recipe) -> Recipe:
    """Resolve a run's directory in the recipe's `model.checkpoint`. Raises UserError as `resolve_start`."""
    checkpoint = recipe.model.checkpoint
    if checkpoint is None or (newest := resolve_start(checkpoint)) == checkpoint:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"checkpoint": newest})})


def _find_here(reference: str, runs_dir: Path) -> Path | None:
    """Find a reference as `find`, but only on local disk; None if there is nothing."""
    places = runs_dir / reference, Path(reference)
    # The name may be too long for the file system, or the path not accessible.
    with suppress(OSError):
        for place in places:
            if is_run(place):
                return _unlinked(place)
        for place in (*places, *(place.parent / CHECKPOINTS / place.name for place in places)):
            if _is_checkpoint(place):
                return place
        for place in places:
            if place.name in (_BEST, _LAST) and not place.exists() and is_run(place.parent):
                from deploy.runs.checkpoints import best_servable, newest_servable

                run = _unlinked(place.parent)
                return best_servable(run) if place.name == _BEST else newest_servable(run).directory
        # The code that reads it reports what is wrong with it.
        if places[1].is_dir():
            return places[1]
    return None


def is_run(directory: Path) -> bool:
    """Whether it looks like a run directory."""
    is_one = (directory / METRICS).is_file() or (directory / RECIPE).is_file()
    return is_one and not _is_checkpoint(directory)


def _is_checkpoint(directory: Path) -> bool:
    """Whether it looks like a checkpoint of full weights, or a peft adapter."""
    return any((directory / name).is_file() for name in (_CONFIG, _ADAPTER_CONFIG))


def _unlinked(directory: Path) -> Path:
    """Follow a link to the run's own directory: `runs/latest` will point to another run later."""
    return directory.parent / directory.readlink() if directory.is_symlink() else directory


def _parent_run(reference: str, runs_dir: Path) -> Path | None:
    """Return the run that contains a reference, such as `RUN/sft` or `RUN/checkpoints/sft`."""
    for parent in Path(reference).parents:
        if parent.name and (found := _find_here(str(parent), runs_dir)) is not None and is_run(found):
            return found
    return None


def _not_found_error(reference: str, runs_dir: Path, nor: str) -> UserError:
    if (run := _parent_run(reference, runs_dir)) is not None:
        names = sorted(path.parent.name for path in (run / CHECKPOINTS).glob(f"[!.]*/{_CONFIG}"))
        what = f"the run {run.name} in {run.parent} has no checkpoint {Path(reference).name}"
        close = get_close_matches(Path(reference).name, names, n=1, cutoff=_LEAST_LIKENESS)
        hint = f"did you mean {run / CHECKPOINTS / close[0]}?" if close else f"it has {', '.join(names) or 'none'}"
        return UserError(f"{what}; {hint}")
    close = get_close_matches(Path(reference).name, run_names(runs_dir), n=1, cutoff=_LEAST_LIKENESS)
    hint = f"did you mean {close[0]}?" if close else f"`{program()} runs ls` lists the runs"
    return UserError(f"there is no run {reference} in {runs_dir}{nor}; {hint}")
