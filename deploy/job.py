"""A run, from the recipe to the last evaluation: what `d1 train` does and what a Ray job runs."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actors.run_log import METRICS, Event, RunLog, read_events
from actors.spec import Phase, RunSpec
from deploy.curves import draw_curves
from deploy.errors import RunFailedError, UserError
from deploy.judges import judge_servers
from deploy.printing import counted
from deploy.ray_session import ray_session
from deploy.recipe import Recipe, Stages
from deploy.run_dir import check_resumable, create_run_dir, make_spec
from deploy.runs import point_latest_at

_POLL_S = 0.5
_CALL_TIMEOUT_S = 60.0


def run(
    recipe: Recipe,
    *,
    stages: Stages,
    start_from: Path | None,
    resume: bool,
    serve: bool,
    on_event: Callable[[Event], None],
) -> None:
    """Run the stages of a recipe on the cluster that RAY_ADDRESS names, or on a Ray of its own.

    Args:
        recipe: validated, and checked against the cluster.
        stages: which of them.
        start_from: a checkpoint directory that becomes policy version 0.
        resume: go on from the newest checkpoint of the run directory.
        serve: answer HTTP requests from the newest version while training; the service stays when the run ends.
        on_event: is given every event of the run log, from a thread of its own.

    Raises:
        UserError: the recipe cannot work, or there is nothing to resume.
        RunFailedError: an actor or the learner group failed for good; the run log says more.
        KeyboardInterrupt: after the run's actors, and its Ray if it started one, have ended.
    """
    began_at = time.time()
    spec = make_spec(recipe, stages)
    on_event(_waiting("reading the run directory" if resume else "making the run directory"))
    if not resume:
        create_run_dir(recipe, spec, start_from)
    else:
        check_resumable(recipe, spec)
    point_latest_at(spec.run_dir)
    num_seen = len(read_events(spec.run_dir))
    if not resume:
        _record_start(recipe, began_at)
    on_event(_waiting("starting Ray" if "RAY_ADDRESS" not in os.environ else "connecting to Ray"))
    with ray_session(dashboard=True) as ray:
        on_event({"event": "status", "what": f"Ray is up; dashboard http://{ray.dashboard_url}"})
        on_event(_waiting("starting the registry"))
        with judge_servers(recipe.reward, spec.run_dir, on_event) if Phase.RL in spec.phases else nullcontext():
            _run_on_ray(
                recipe, spec, num_seen=num_seen, serve=serve, keep_store=serve and not ray.is_ours, on_event=on_event
            )
        if serve and ray.is_ours:
            _wait_for_interrupt()


def _run_on_ray(
    recipe: Recipe, spec: RunSpec, *, num_seen: int, serve: bool, keep_store: bool, on_event: Callable[[Event], None]
) -> None:
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from actors.cluster import fit, start_actors, stop_actors, wait_until_ready
    from actors.registry_server import registry_url

    try:
        url = registry_url()
        actors = start_actors(spec, recipe.grading.num_graders, url)
    except ValueError as error:
        # A registry that cannot serve this cluster, or the actors of a run of the same name that is under way.
        raise UserError(str(error)) from error
    try:
        # Before the pools are up: they and the learner group take as long to start, and need not wait in turn.
        fitted = _in_thread(lambda: fit(spec, actors))
        pools = f"{counted(spec.rollout.num_samplers, 'sampler')} and {counted(recipe.grading.num_graders, 'grader')}"
        learners = counted(spec.learner.num_workers, "learner")
        on_event(_waiting(f"starting {pools}, and {learners} beside them"))
        wait_until_ready(actors)
        if serve:
            on_event(_waiting("starting the service"))
            on_event({"event": "status", "what": _start_service(recipe, url, lambda what: on_event(_waiting(what)))})
        on_event(_waiting(f"starting {learners}; then comes the first evaluation"))
        with _following(actors.coordinator, num_seen, on_event):
            fitted.result()
            _call(actors.coordinator.finish.remote())
        draw_curves(read_events(spec.run_dir), spec.run_dir / "curves.png")
    except (RayError, TrainingFailedError, TimeoutError) as error:
        raise RunFailedError(
            f"the run failed: {_cause(error)}; the failures are in {spec.run_dir / METRICS}; --resume goes on from the "
            "newest checkpoint"
        ) from error
    finally:
        stop_actors(actors, keep_store=keep_store)


def _waiting(what: str) -> Event:
    """What the driver waits for: for a person who watches, and not for the run log."""
    return {"event": "waiting", "what": what}


def _cause(error: Exception) -> str:
    """What failed first, in a line: Ray wraps it in the tracebacks of every process on the way."""
    failures = getattr(error, "worker_failures", {})
    for failure in failures.values():
        error = getattr(failure, "cause", None) or failure
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def _record_start(recipe: Recipe, began_at: float) -> None:
    log = RunLog(recipe.run_dir)
    log.append(
        "run",
        name=recipe.name,
        seed=recipe.seed,
        began_at=began_at,
        commit=_git_commit(),
        hardware=f"{os.cpu_count()} cores, {platform.machine()}, {recipe.device}",
        versions={name: version(name) for name in ("d1", "ray", "torch", "transformers")} | {"python": _python()},
    )
    log.close()


def _python() -> str:
    return platform.python_version()


def _git_commit() -> str:
    """The commit that d1 runs from, `+` marking local changes; `unknown` for an installed package."""
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


@contextmanager
def _following(coordinator: Any, num_seen: int, on_event: Callable[[Event], None]) -> Iterator[None]:
    """Hand every new event to `on_event`, from a thread, until the block ends."""
    ended = threading.Event()

    def follow() -> None:
        import ray

        seen = num_seen
        while True:
            is_last = ended.wait(_POLL_S)
            try:
                events = _call(coordinator.events_since.remote(seen))
            except ray.exceptions.RayError:
                return  # The coordinator is gone: `fit` says why.
            for event in events:
                on_event(event)
            seen += len(events)
            if is_last:
                return

    thread = threading.Thread(target=follow, name="d1-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=2 * _POLL_S + 5)


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread, so that Ctrl-C reaches us: in the main thread Ray Train takes the signal for itself."""
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
    """Put the service up, saying what that waits for; what to tell the user about it."""
    from deploy.service import banner, deploy_source
    from deploy.service.source import Source

    service, source = recipe.service, Source(directory=str(recipe.run_dir), is_run=True, registry_url=registry)
    url = deploy_source(source, service.host, service.port, service.num_replicas, say=say)
    return banner(recipe.run_dir, url, source.admin_address())


def _wait_for_interrupt() -> None:
    """The service lives in our Ray: stay until Ctrl-C."""
    threading.Event().wait()
