"""`d1 policy`: pin the policy version that a run's service serves, or pause its updates."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.options import RunName, RunsDir
from deploy.errors import UserError, os_errors

_RUNS_DIR = Path("runs")
_Why = Annotated[str, typer.Option(metavar="TEXT", help="The reason, shown with the event in /v1/policy/events.")]

app = typer.Typer(help="Pin or pause the policy version that a run's service serves.", no_args_is_help=True)


@app.command()
def pin(
    name: RunName,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=0, help="The policy version.")],
    *,
    why: _Why = "",
    runs_dir: RunsDir = _RUNS_DIR,
) -> None:
    """Serve one policy version, whatever is published, until `d1 policy unpin`."""
    from actors.registry.files import history_of
    from actors.run_log import read_events

    run_dir = _found(name, runs_dir)
    known = {policy.version: policy for policy in history_of(run_dir, read_events(run_dir))}
    if version not in known:
        kept = ", ".join(str(policy.version) for policy in known.values() if policy.checkpoint is not None)
        raise UserError(
            f"the run {run_dir.name} has no policy version {version}; it has checkpoints of {kept or 'none'}"
        )
    _change(run_dir, why, pinned=version)
    if known[version].checkpoint is None:
        typer.echo(f"note: version {version} has no checkpoint, so only a running training can still provide it")


@app.command()
def unpin(name: RunName, *, why: _Why = "", runs_dir: RunsDir = _RUNS_DIR) -> None:
    """Serve the newest published version again."""
    _change(_found(name, runs_dir), why, pinned=None)


@app.command()
def pause(name: RunName, *, why: _Why = "", runs_dir: RunsDir = _RUNS_DIR) -> None:
    """Keep the version that is served now, whatever is published, until `d1 policy resume`."""
    _change(_found(name, runs_dir), why, is_paused=True)


@app.command()
def resume(name: RunName, *, why: _Why = "", runs_dir: RunsDir = _RUNS_DIR) -> None:
    """Swap to newly published versions again."""
    _change(_found(name, runs_dir), why, is_paused=False)


def _found(name: str, runs_dir: Path) -> Path:
    from deploy.runs.references import find_run

    return find_run(name, runs_dir)


def _change(run_dir: Path, why: str, **changes: Any) -> None:
    """Write the operator's settings, which the engines read, and print them. A damaged file is replaced."""
    from actors.registry.files import read_admin, write_admin
    from actors.registry.records import DEFAULT_ADMIN_STATE

    try:
        before = read_admin(run_dir)
    except ValueError:
        before = DEFAULT_ADMIN_STATE
    # Engines ignore older settings, and another operator's clock may be ahead.
    changed_at = max(time.time(), before.changed_at + 0.001)
    state = replace(before, why=why, changed_at=changed_at, **changes)
    with os_errors(f"{run_dir} cannot be written to"):
        write_admin(run_dir, state)
    pinned = "not pinned" if state.pinned is None else f"pinned to policy version {state.pinned}"
    paused = "paused" if state.is_paused else "not paused"
    typer.echo(f"{run_dir.name}: {pinned}, {paused}; its service follows within seconds")
