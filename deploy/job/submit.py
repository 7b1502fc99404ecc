"""Idempotent submission of a run as a Ray job: submitting it twice does not run it twice."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import RunFailedError, UserError, first_line
from deploy.printing import printable
from deploy.program import command as command_of
from deploy.program import program
from learner.model.hub import is_hub_id
from learner.objectives import DistillationConfig

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from deploy.recipe.recipe import Recipe

# Ray itself excludes what git ignores; these are for a tree that is no git checkout.
_EXCLUDES = ["/runs", "/.venv", "/.git"]
# `ray job stop` sends SIGTERM, and by default SIGKILL three seconds later: too soon for a checkpoint. `d1 train` limits
# that wait itself, and ends.
_ENVIRONMENT = {"RAY_JOB_STOP_WAIT_TIME_S": "3600"}
_SUCCEEDED, _FAILED_STATES = "SUCCEEDED", ("FAILED", "STOPPED")
_POLL_S = 2.0
# Long enough for a head node to restart.
_HEAD_RESTART_TIMEOUT_S = 300.0


def connect(address: str | None) -> JobSubmissionClient:
    """Connect Ray's job client, which takes the token from RAY_AUTH_TOKEN or ~/.ray/auth_token.

    Raises UserError if no cluster answers, or it rejects the token.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    if address is not None:
        # The client prefers RAY_ADDRESS to its argument, and this variable to both.
        os.environ["RAY_API_SERVER_ADDRESS"] = address
    where = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "this machine"
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise UserError(
            f"the cluster at {where} refused the connection; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the "
            "cluster's token"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {where}; start one with `ray start --head`, or say --address http://HOST:8265"
        ) from error


def submit(
    client: JobSubmissionClient,
    recipe: Recipe,
    recipe_path: Path,
    overrides: Sequence[str],
    *,
    serve: bool,
    say: Callable[[str], None],
) -> str:
    """Submit the recipe's run unless it already runs or is done; return the id of the job to follow.

    The job's id is the run's name. After a job that failed or was stopped come `name-r1`, `name-r2`, ..., each of which
    resumes the run. Raises UserError if the cluster rejects the job.
    """
    statuses = {job.submission_id: str(job.status) for job in client.list_jobs()}
    attempt, job_id = 0, recipe.name
    while statuses.get(job_id) in _FAILED_STATES:
        attempt += 1
        job_id = f"{recipe.name}-r{attempt}"
    if status := statuses.get(job_id):
        state = "has already succeeded" if status == _SUCCEEDED else f"is already {status.lower()}"
        say(f"job {job_id} {state}; not submitted again (choose name=... for another run)")
        return job_id
    command = ["d1", "train", _relative(recipe_path), *overrides, *_absolute_paths(recipe)]
    command += ["--serve"] if serve else []
    command += ["--resume-or-start"] if attempt else []
    runtime_env = {"working_dir": ".", "excludes": _EXCLUDES, "env_vars": _ENVIRONMENT}
    try:
        client.submit_job(entrypoint=shlex.join(command), submission_id=job_id, runtime_env=runtime_env)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the cluster did not take job {job_id}: {first_line(error)}") from error
    resumes = f" to resume {recipe.name}" if attempt else ""
    say(f"submitted job {job_id}{resumes}; its run directory is {recipe.run_dir}")
    if "://" in (recipe.checkpoint_url or ""):
        say(f"to fetch the run later: {command_of('runs', 'fetch', f'{recipe.checkpoint_url}/{recipe.name}')}")
    return job_id


def follow(client: JobSubmissionClient, job_id: str, write: Callable[[str], None]) -> int:
    """Write a job's log until it ends; return its exit code.

    Raises RunFailedError if the cluster does not answer for `_HEAD_RESTART_TIMEOUT_S`.
    """
    asyncio.run(_write_log(client, job_id, write))
    heard_at = time.monotonic()
    while True:
        try:
            info = client.get_job_info(job_id)
        except (RuntimeError, OSError) as error:
            if time.monotonic() - heard_at > _HEAD_RESTART_TIMEOUT_S:
                raise RunFailedError(
                    f"the cluster has not reported the state of job {job_id} for {_HEAD_RESTART_TIMEOUT_S:.0f} s: "
                    f"{first_line(error)}; it may still run, and the same command follows it again"
                ) from error
        else:
            heard_at, status = time.monotonic(), str(info.status)
            if status == _SUCCEEDED:
                return 0
            if status in _FAILED_STATES:
                write(f"\njob {job_id} {status.lower()}: {printable(info.message or '')}\n")
                return int(info.driver_exit_code or 1)
        time.sleep(_POLL_S)


async def _write_log(client: JobSubmissionClient, job_id: str, write: Callable[[str], None]) -> None:
    from aiohttp import ClientError

    try:
        async for text in client.tail_job_logs(job_id):
            write(printable(text))
    except (RuntimeError, OSError, ClientError) as error:
        # The stream broke; the job may still run.
        write(f"\nthe log stream of {job_id} ended ({printable(str(error))}); waiting for the job\n")


def _relative(recipe_path: Path) -> str:
    """Make the recipe's path relative to the working directory: the job starts in a copy of it."""
    try:
        return str(recipe_path.resolve().relative_to(Path.cwd()))
    except ValueError as error:
        raise UserError(
            f"the recipe {recipe_path} is not below {Path.cwd()}, the directory that is sent to the cluster; "
            f"run `{program()} submit` from a directory that holds it"
        ) from error


def _absolute_paths(recipe: Recipe) -> list[str]:
    """Return overrides that make paths absolute: relative ones would be in the job's copy, which Ray deletes."""
    paths = {"runs_dir": recipe.runs_dir}
    if recipe.model.checkpoint is not None and not is_hub_id(recipe.model.checkpoint):
        paths["model.checkpoint"] = recipe.model.checkpoint
    objective = recipe.learner.objective
    if isinstance(objective, DistillationConfig) and objective.teacher is not None:
        paths["learner.objective.teacher"] = objective.teacher
    url = recipe.checkpoint_url
    # fsspec expands ~ to the home directory of the job's user.
    if url is not None and "://" not in url and not url.startswith("~"):
        paths["checkpoint_url"] = Path(url)
    return [f"{key}={path.resolve()}" for key, path in paths.items() if not path.is_absolute()]
