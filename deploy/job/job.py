"""A run, from the recipe to the last evaluation: what `d1 train` does and what a Ray job runs."""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.run_log import DRIVER_LOG, METRICS, Event, RunLog, append_event, read_events
from actors.spec import Phase, RunSpec
from deploy.capacity.needs import checkpoint_bytes
from deploy.errors import EXIT_RUN_FAILED, RunFailedError, UserError
from deploy.interrupts import terminated_by_sigterm, wait_for_interrupt, wait_until_done
from deploy.job.following import checkpoint_on_stop, following
from deploy.job.judges import judge_servers
from deploy.job.mirroring import mirrored
from deploy.job.node_watch import node_processes, watching
from deploy.job.ray_output import redirect_native_output
from deploy.job.scaling import scaling
from deploy.job.watchdog import failure_message, watchdog
from deploy.orphans import adopt_orphans, kill_descendants
from deploy.printing import counted
from deploy.program import version_of
from deploy.ray_session import ray_session, registry_of_cluster
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.listing import point_latest_at
from deploy.runs.lock import RunLock
from deploy.runs.mirror import Mirror, mirror_for
from deploy.runs.run_directory import check_resumable, create_run_dir, make_spec
from deploy.service.source import Source

if TYPE_CHECKING:
    from actors.cluster import RunActors

_CALL_TIMEOUT_S = 60.0
_NODE_ENDS_S = 3.0
# Part of Ray's message about a process that it killed to free memory, however often the error is wrapped.
_OUT_OF_MEMORY = "how to address the out of memory issue"


def run(
    recipe: Recipe,
    *,
    stages: Stages,
    start_from: Path | None,
    resume: bool,
    serve: bool,
    on_event: Callable[[Event], None],
) -> None:
    """Run the stages of a recipe on the cluster that RAY_ADDRESS names, or on a local Ray that it starts.

    Args:
        recipe: validated, and checked against the cluster.
        stages: which of them.
        start_from: a checkpoint directory that becomes policy version 0.
        resume: continue from the newest checkpoint of the run directory.
        serve: answer HTTP requests from the newest version while training; the service stays when the run ends.
        on_event: receives every event of the run log on a background thread, and the driver's own messages.

    Raises:
        UserError: the recipe cannot work, or there is nothing to resume.
        RunFailedError: an actor or the learner group failed for good, or the service did not come up; the run log says
            more.
        KeyboardInterrupt: after the run's actors, and its Ray if it started one, have ended.
    """
    began_at = time.time()
    spec = make_spec(recipe, stages)
    mirror = mirror_for(recipe, resume=resume)
    on_event(_waiting("reading the run directory" if resume else "making the run directory"))
    if resume:
        check_resumable(recipe, spec)

    def say(what: str) -> None:
        on_event(_waiting(what) | {"goes_on": True})

    with closing(RunLock.take(spec.run_dir) if resume else create_run_dir(recipe, spec, start_from, say)) as lock:
        if not lock.is_exclusive:
            what = f"the file system of {spec.run_dir} has no file locks: make sure that nothing else trains this run"
            on_event({"event": "status", "what": what})
        num_seen = len(read_events(spec.run_dir))
        if not resume:
            _record_start(recipe, stages, began_at)
        _run_locked(recipe, spec, mirror, num_seen=num_seen, serve=serve, on_event=on_event)


def _run_locked(
    recipe: Recipe,
    spec: RunSpec,
    mirror: Mirror | None,
    *,
    num_seen: int,
    serve: bool,
    on_event: Callable[[Event], None],
) -> None:
    point_latest_at(spec.run_dir)
    adopt_orphans()
    on_event(_waiting("starting Ray" if "RAY_ADDRESS" not in os.environ else "connecting to Ray"))
    with (
        redirect_native_output(spec.run_dir / DRIVER_LOG),
        watchdog(spec.run_dir, spec.name),
        ray_session(dashboard=True) as ray,
        # After Ray's start, which installs its own SIGTERM handler.
        terminated_by_sigterm(),
        watching(node_processes(), lambda name: _end_with_node(spec, f"{name} died", ray.logs_dir, on_event)),
    ):
        on_event({"event": "status", "what": f"Ray is up; dashboard http://{ray.dashboard_url}"})
        on_event(_waiting("starting the registry"))
        with judge_servers(recipe.reward, spec.run_dir, on_event) if Phase.RL in spec.phases else nullcontext():
            keep_store = serve and not ray.is_ours
            _run_on_ray(
                recipe,
                spec,
                mirror,
                num_seen=num_seen,
                serve=serve,
                keep_store=keep_store,
                dashboard_url=ray.dashboard_url,
                on_event=on_event,
            )
        if serve and ray.is_ours:
            wait_for_interrupt()


def _run_on_ray(
    recipe: Recipe,
    spec: RunSpec,
    mirror: Mirror | None,
    *,
    num_seen: int,
    serve: bool,
    keep_store: bool,
    dashboard_url: str,
    on_event: Callable[[Event], None],
) -> None:
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from actors.cluster import LearnerFailedError, fit, start_actors, stop_actors, wait_until_ready

    url = registry_of_cluster()
    try:
        actors = start_actors(spec, recipe.grading.num_graders, url, secrets.token_hex(8))
    except ValueError as error:
        # A run of the same name is under way, with actors of the same names.
        raise UserError(str(error)) from error
    scale = partial(_scale_engines, _source(recipe, url), dashboard_url)
    try:
        # Before the pools are up: they and the learner group take about as long to start, so they start in parallel.
        fitted = _in_thread(lambda: fit(spec, actors))
        pools = f"{counted(spec.rollout.num_samplers, 'sampler')} and {counted(recipe.grading.num_graders, 'grader')}"
        learners = counted(spec.learner.num_workers, "learner")
        on_event(_waiting(f"starting {pools}, and {learners}"))

        def note_failure(what: str) -> None:
            actors.coordinator.record.remote("failure", {"what": what, "attempt": 1})

        with (
            mirrored(mirror, spec.run_dir, on_event, note_failure) as heard,
            following(actors.coordinator, num_seen, heard),
            scaling(recipe, spec, actors, on_event, scale if serve else None),
            checkpoint_on_stop(fitted, actors.coordinator, on_event, checkpoint_bytes(recipe)),
        ):
            wait_until_ready(actors)
            if serve:
                on_event(_waiting("starting the service"))
                on_event(
                    {"event": "status", "what": _start_service(recipe, url, lambda what: on_event(_waiting(what)))}
                )
            on_event(_waiting(f"starting {learners}; the first evaluation follows"))
            wait_until_done(fitted)
            fitted.result()
            _call(actors.coordinator.finish.remote())
    except (RayError, TrainingFailedError, LearnerFailedError, RunFailedError, TimeoutError) as error:
        # A raylet that receives SIGTERM ends its workers before itself: let `watching` name the raylet as the cause.
        time.sleep(_NODE_ENDS_S)
        cause = _dead_actor(actors) or _cause(error)
        stop_actors(actors, keep_store=keep_store)
        raise RunFailedError(_failed(spec, cause, num_seen)) from error
    except BaseException:
        stop_actors(actors, keep_store=keep_store)
        raise
    stop_actors(actors, keep_store=keep_store)


def _dead_actor(actors: RunActors) -> str | None:
    """Name the dead actor among those that a run depends on, if any: other errors report that only in Ray's words."""
    from ray.exceptions import ActorDiedError, RayError

    for name, ask in (("the coordinator", actors.coordinator.gave_up), ("the weight store", actors.store.ready)):
        try:
            _call(ask.remote())
        except ActorDiedError:
            return f"{name} died"
        except RayError:
            continue
    return None


def _failed(spec: RunSpec, cause: str, num_seen: int) -> str:
    """Format the message for a failed run, and append the cause to the run log unless it is there.

    The driver appends it because the coordinator is gone. If that fails, the message does not mention the log.
    """
    where = f"the failures are in {spec.run_dir / METRICS}; "
    failures = [str(event["what"]) for event in read_events(spec.run_dir)[num_seen:] if event["event"] == "failure"]
    if not any(cause in what for what in failures):
        try:
            append_event(spec.run_dir, "failure", what=cause, attempt=1)
        except OSError:
            where = ""
    return f"the run failed: {cause}; {where}--resume goes on from the newest checkpoint"


def _end_with_node(spec: RunSpec, what: str, logs_dir: Path, on_event: Callable[[Event], None]) -> None:
    """Report what died, and end this process before Ray's native code does."""
    sentence = failure_message(spec.run_dir, spec.name, what, f"its logs are in {logs_dir}")
    on_event({"event": "lost", "what": sentence})
    kill_descendants()
    os._exit(EXIT_RUN_FAILED)


def _waiting(what: str) -> Event:
    """Build an event that says what the driver waits for: for display only, not for the run log."""
    return {"event": "waiting", "what": what}


def _cause(error: Exception) -> str:
    """Extract the root cause in one line: Ray wraps it in the tracebacks of every process on the way."""
    from actors.cluster import LearnerFailedError

    if isinstance(error, LearnerFailedError | RunFailedError):
        return str(error)
    failures = getattr(error, "worker_failures", {})
    for failure in failures.values():
        error = getattr(failure, "cause", None) or failure
    if _OUT_OF_MEMORY in str(error):
        return "a machine ran out of memory and Ray killed a process of the run; end other programs or use fewer actors"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def _record_start(recipe: Recipe, stages: Stages, began_at: float) -> None:
    log = RunLog(recipe.run_dir)
    versions = {name: version_of(name) for name in ("d1", "ray", "torch", "transformers")}
    log.append(
        "run",
        name=recipe.name,
        seed=recipe.seed,
        stages=stages,
        began_at=began_at,
        commit=_git_commit(),
        hardware=f"{os.cpu_count()} cores, {platform.machine()}, {recipe.device}",
        versions=versions | {"python": platform.python_version()},
    )
    log.close()


def _git_commit() -> str:
    """Return the commit that d1 runs from, `+` marking local changes; `unknown` for an installed package."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],  # noqa: S607 - whichever git the user has
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread, so that Ctrl-C reaches us: in the main thread Ray Train handles the signal itself."""
    done: Future[None] = Future()

    def do() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=do, name="d1-fit", daemon=True).start()
    return done


def _call(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=_CALL_TIMEOUT_S)


def _start_service(recipe: Recipe, registry: str, say: Callable[[str], None]) -> str:
    """Start the service, with progress to `say`; return the banner for the user."""
    from deploy.service.on_ray.launch import banner, deploy_source

    service, source = recipe.service, _source(recipe, registry)
    replicas, share = service.num_replicas, recipe.gpus.engine
    url = deploy_source(source, service.host, service.port, replicas, num_gpus=share, say=say)
    return banner(recipe.run_dir, url)


def _scale_engines(source: Source, dashboard_url: str, num_replicas: int) -> None:
    from deploy.service.on_ray.launch import scale_engines

    scale_engines(source, num_replicas, dashboard_url)


def _source(recipe: Recipe, registry: str) -> Source:
    return Source(directory=str(recipe.run_dir), is_run=True, registry_url=registry)
