"""Mirror of a run directory at any fsspec URL: its checkpoints, logs and recipe.

A mirrored checkpoint is complete only if its manifest exists: the manifest is uploaded last and deleted first.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from actors.checkpoints.selection import read_position
from actors.registry.files import ADMIN
from actors.run_log import CHECKPOINTS, METRICS, RECIPE, SAMPLES, SOLVE_RATES
from deploy.errors import UserError, user_errors
from deploy.recipe.recipe import Recipe
from learner.model.checkpoint_files import MANIFEST
from learner.model.storage.references import read_references

# The recipe is uploaded last: if it exists, the mirrored run has a policy.
_OF_THE_RUN = (METRICS, SAMPLES, SOLVE_RATES, ADMIN, RECIPE)


class Mirror:
    """Mirror of one run. Any method may raise errors of its file system, an OSError or another."""

    def __init__(self, url: str, run: str) -> None:
        """Open the mirror of the named run in the directory `url`. Raises UserError if fsspec cannot use the URL."""
        import fsspec

        self.url = f"{url.rstrip('/')}/{run}"
        """URL of the run's mirror."""
        with user_errors(ImportError, ValueError, prefix=f"checkpoint_url {url} cannot be used: "):
            # No listings cache: writes by other machines must be visible.
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)

    def has_run(self) -> bool:
        """Check whether the mirror has a run."""
        return bool(self._files.exists(f"{self._root}/{RECIPE}"))

    def push(self, run_dir: Path) -> None:
        """Update the mirror from a run directory: upload what is new, then delete what the run has deleted.

        A run always has a checkpoint. If none is left, something else deleted them, and the mirror keeps its own.
        """
        here = dict(_whole_checkpoints(run_dir))
        there = self._manifests()
        for name, manifest in here.items():
            if there.get(name) != manifest:
                self._put_checkpoint(run_dir / CHECKPOINTS / name)
        # A checkpoint that is damaged in the run directory may be intact in the mirror.
        for name in there if here else ():
            if not (run_dir / CHECKPOINTS / name).exists():
                self._delete(name)
        for name in _OF_THE_RUN:
            if (run_dir / name).is_file():
                self._put(run_dir / name, name)

    def pull(self, run_dir: Path) -> None:
        """Download the run into `run_dir`, atomically."""
        partial = run_dir.with_name(f".{run_dir.name}.fetched")
        shutil.rmtree(partial, ignore_errors=True)
        names = [name for name in _OF_THE_RUN if self._files.exists(f"{self._root}/{name}")]
        for checkpoint, manifest in self._manifests().items():
            if manifest is not None:
                listed = self._files.ls(f"{self._root}/{CHECKPOINTS}/{checkpoint}", detail=False)
                names += [f"{CHECKPOINTS}/{checkpoint}/{path.rpartition('/')[2]}" for path in listed]
        for name in names:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(f"{self._root}/{name}", str(partial / name))
        partial.rename(run_dir)

    def _manifests(self) -> dict[str, bytes | None]:
        """Return the manifest of each checkpoint in the mirror; None for an incomplete one."""
        try:
            listed = self._files.ls(f"{self._root}/{CHECKPOINTS}", detail=False)
        except FileNotFoundError:
            return {}
        found: dict[str, bytes | None] = {}
        for path in listed:
            manifest, name = f"{path.rstrip('/')}/{MANIFEST}", path.rstrip("/").rpartition("/")[2]
            found[name] = self._files.cat_file(manifest) if self._files.exists(manifest) else None
        return found

    def _put_checkpoint(self, directory: Path) -> None:
        where = f"{CHECKPOINTS}/{directory.name}"
        self._delete(directory.name)
        try:
            # References point to files of this machine: the mirror gets the files themselves.
            files = {*directory.iterdir(), *(reference.path for reference in read_references(directory).values())}
            for path in sorted(files, key=lambda path: path.name == MANIFEST):
                self._put(path, f"{where}/{path.name}")
        except FileNotFoundError:
            # The run has deleted or rewritten it meanwhile: the next push sees the new state.
            self._delete(directory.name)

    def _put(self, path: Path, name: str) -> None:
        self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), f"{self._root}/{name}")

    def _delete(self, name: str) -> None:
        where = f"{self._root}/{CHECKPOINTS}/{name}"
        if self._files.exists(f"{where}/{MANIFEST}"):
            self._files.rm_file(f"{where}/{MANIFEST}")
        if self._files.exists(where):
            self._files.rm(where, recursive=True)


def _whole_checkpoints(run_dir: Path) -> list[tuple[str, bytes]]:
    """Return the checkpoints of a run directory with their manifests, each after those that it builds on."""
    found = []
    for directory in (run_dir / CHECKPOINTS).glob("[!.]*/"):
        try:
            found.append((read_position(directory).order, directory.name, (directory / MANIFEST).read_bytes()))
        except (ValueError, OSError):
            continue  # It is damaged, or being deleted.
    return [(name, manifest) for _, name, manifest in sorted(found)]


def mirror_for(recipe: Recipe, *, resume: bool) -> Mirror | None:
    """Return the mirror that the recipe configures, if any.

    Raises UserError if it cannot be used, or if it already has a run of that name and `resume` is False.
    """
    if recipe.checkpoint_url is None:
        return None
    mirror = Mirror(recipe.checkpoint_url, recipe.name)
    with user_errors(Exception, prefix=f"checkpoint_url {recipe.checkpoint_url} cannot be read: "):
        has_run = mirror.has_run()
    if has_run and not resume:
        raise UserError(
            f"there already is a run {recipe.name} in checkpoint_url {recipe.checkpoint_url}; choose name=..., or go "
            "on with it by --resume"
        )
    return mirror


def fetch_run(recipe: Recipe) -> None:
    """Restore the directory of a resumed run from its mirror, if it is missing here and the mirror has it.

    Raises UserError if the mirror cannot be read.
    """
    if recipe.run_dir.exists() or (mirror := mirror_for(recipe, resume=True)) is None:
        return
    # Of whichever fsspec backend.
    with user_errors(Exception, prefix=f"checkpoint_url {recipe.checkpoint_url} cannot be read: "):
        if mirror.has_run():
            mirror.pull(recipe.run_dir)


def fetch_mirrored(url: str, runs_dir: Path) -> Path:
    """Download the run of a mirror's URL, `checkpoint_url/NAME`, and return its new directory below `runs_dir`.

    Raises UserError if there is no such mirror, or a directory of that name is here already.
    """
    place, _, name = url.rstrip("/").rpartition("/")
    run_dir = runs_dir / name
    if run_dir.exists():
        raise UserError(f"{run_dir} exists already; remove it, or choose another --runs-dir")
    with user_errors(Exception, prefix=f"checkpoint_url {place} cannot be read: "):
        mirror = Mirror(place, name)
        has_run = mirror.has_run()
        if has_run:
            runs_dir.mkdir(parents=True, exist_ok=True)
            mirror.pull(run_dir)
    if not has_run:
        raise UserError(f"there is no run at {url}; it is checkpoint_url/NAME of the run's recipe")
    return run_dir
