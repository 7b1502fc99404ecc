"""`d1 submit`: submitting a run twice does not run it twice."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import requests

from deploy.errors import RunFailedError, UserError
from deploy.job.following import STOP_GRACE_S
from deploy.job.submit import connect, follow, submit
from deploy.recipe.overrides import load_recipe


@dataclass
class Job:
    submission_id: str
    status: str
    entrypoint: str = ""
    message: str = ""
    driver_exit_code: int | None = None


@dataclass
class FakeCluster:
    """Fake job server that refuses what Ray's would refuse."""

    jobs: dict[str, Job] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    breaks: bool = False

    def list_jobs(self) -> list[Job]:
        return list(self.jobs.values())

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> str:
        if submission_id in self.jobs:
            raise RuntimeError(f"Job with submission_id {submission_id} already exists.\nTraceback ...")
        assert Path(runtime_env["working_dir"]).is_dir()
        assert {"/runs", "/.venv", "/.git"} <= set(runtime_env["excludes"])
        assert int(runtime_env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > STOP_GRACE_S, "time for a checkpoint"
        words = shlex.split(entrypoint)
        assert words[:2] == ["d1", "train"]
        assert not Path(words[2]).is_absolute(), "the job starts in a copy of the directory"
        self.jobs[submission_id] = Job(submission_id, "PENDING", entrypoint)
        return submission_id

    def get_job_info(self, job_id: str) -> Job:
        return self.jobs[job_id]

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        assert job_id in self.jobs
        for text in self.log:
            yield text
        if self.breaks:
            raise RuntimeError("WebSocket connection closed unexpectedly")


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def submit_tiny(cluster: FakeCluster, recipe_file: Path) -> Callable[..., tuple[str, str]]:
    def run(*overrides: str, serve: bool = False) -> tuple[str, str]:
        said: list[str] = []
        recipe = load_recipe(recipe_file, overrides)
        return submit(cluster, recipe, recipe_file, overrides, serve=serve, say=said.append), said[0]

    return run


def test_a_new_run_is_submitted_under_its_name(cluster: FakeCluster, submit_tiny: Callable, workdir: Path) -> None:
    job_id, said = submit_tiny("learner.lr=1e-5", "task={name: sums, num_terms: 3}")
    assert job_id == "tiny"
    assert said.startswith("submitted job tiny")
    words = shlex.split(cluster.jobs["tiny"].entrypoint)
    assert words[2:5] == ["tiny.yaml", "learner.lr=1e-5", "task={name: sums, num_terms: 3}"]
    assert "--resume-or-start" not in words
    assert "--serve" not in words


def test_relative_paths_are_made_absolute_for_the_job(
    cluster: FakeCluster, submit_tiny: Callable, workdir: Path
) -> None:
    submit_tiny("model.checkpoint=start")
    words = shlex.split(cluster.jobs["tiny"].entrypoint)
    assert words[-2:] == [f"runs_dir={workdir}/runs", f"model.checkpoint={workdir}/start"]
    submit_tiny("name=b", "runs_dir=/shared/runs")
    assert shlex.split(cluster.jobs["b"].entrypoint)[-1] == "runs_dir=/shared/runs"
    submit_tiny("name=c", "model.checkpoint=GSAI-ML/LLaDA-8B-Base")
    assert shlex.split(cluster.jobs["c"].entrypoint)[-1] == f"runs_dir={workdir}/runs", "a hub id is no path"


@pytest.mark.parametrize("url", ["s3://bucket/runs", "/shared/copies", "~/copies"])
def test_checkpoint_url_is_absolute_and_not_in_the_jobs_working_copy(
    url: str, cluster: FakeCluster, submit_tiny: Callable, workdir: Path
) -> None:
    submit_tiny("checkpoint_url=../copies")
    given = shlex.split(cluster.jobs["tiny"].entrypoint)[-2:]
    assert given == [f"runs_dir={workdir}/runs", f"checkpoint_url={workdir.parent}/copies"]
    submit_tiny("name=b", f"checkpoint_url={url}")
    assert shlex.split(cluster.jobs["b"].entrypoint)[-1] == f"runs_dir={workdir}/runs"


@pytest.mark.parametrize(
    ("status", "part"),
    [("PENDING", "already pending"), ("RUNNING", "already running"), ("SUCCEEDED", "already succeeded")],
)
def test_a_running_or_finished_run_is_not_submitted_again(
    status: str, part: str, cluster: FakeCluster, submit_tiny: Callable
) -> None:
    cluster.jobs["tiny"] = Job("tiny", status)
    job_id, said = submit_tiny()
    assert job_id == "tiny"
    assert part in said
    assert len(cluster.jobs) == 1


@pytest.mark.parametrize("status", ["FAILED", "STOPPED"])
def test_a_run_that_failed_is_resumed_under_the_next_id(
    status: str, cluster: FakeCluster, submit_tiny: Callable
) -> None:
    cluster.jobs["tiny"] = Job("tiny", status)
    job_id, _ = submit_tiny(serve=True)
    assert job_id == "tiny-r1"
    assert shlex.split(cluster.jobs["tiny-r1"].entrypoint)[-2:] == ["--serve", "--resume-or-start"]
    # While it runs, nothing new is submitted. Once it has failed again, the next job is.
    assert submit_tiny()[0] == "tiny-r1"
    cluster.jobs["tiny-r1"].status = "FAILED"
    assert submit_tiny()[0] == "tiny-r2"
    assert len(cluster.jobs) == 3


def test_the_entrypoint_is_a_command_that_d1_understands(
    cluster: FakeCluster, submit_tiny: Callable, d1: Callable
) -> None:
    submit_tiny("seed=3")
    words = shlex.split(cluster.jobs["tiny"].entrypoint)
    ended = d1(*words[1:], "--dry-run")
    assert ended.status == 0
    assert "seed: 3" in ended.out


def test_a_recipe_outside_of_the_working_directory_is_refused(
    cluster: FakeCluster, recipe_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    recipe = load_recipe(recipe_file, [])
    with pytest.raises(UserError, match=r"is not below .*the directory that is sent to the cluster"):
        submit(cluster, recipe, recipe_file, [], serve=False, say=print)
    assert cluster.jobs == {}


def test_a_refusal_of_the_cluster_is_one_sentence(cluster: FakeCluster, submit_tiny: Callable) -> None:
    cluster.list_jobs = list  # type: ignore[method-assign] - another submitter was faster
    cluster.jobs["tiny"] = Job("tiny", "RUNNING")
    with pytest.raises(UserError) as refused:
        submit_tiny()
    assert str(refused.value) == "the cluster did not take job tiny: Job with submission_id tiny already exists."


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Job("a", "SUCCEEDED"), 0),
        (Job("a", "FAILED", driver_exit_code=2, message="it failed"), 2),
        (Job("a", "FAILED"), 1),
        (Job("a", "STOPPED"), 1),
    ],
)
def test_following_ends_with_the_jobs_exit_code(job: Job, expected: int) -> None:
    written: list[str] = []
    cluster = FakeCluster(jobs={"a": job}, log=("round 1\n", "\x1b]0;title\x07round 2\n"))
    assert follow(cluster, "a", written.append) == expected
    text = "".join(written)
    assert text.startswith("round 1\n\\u001b]0;title\\u0007round 2\n")
    assert job.message in text


def test_a_broken_log_stream_is_not_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.job.submit._POLL_S", 0.01)
    statuses = iter(["RUNNING", "RUNNING", "SUCCEEDED"])
    cluster = FakeCluster(jobs={"a": Job("a", "RUNNING")}, breaks=True)
    cluster.get_job_info = lambda job_id: Job(job_id, next(statuses))  # type: ignore[method-assign]
    written: list[str] = []
    assert follow(cluster, "a", written.append) == 0
    assert "the log stream of a ended" in "".join(written)


class Away(FakeCluster):
    """A cluster whose dashboard is unreachable for `num_away` requests, and that refuses to show a log."""

    num_away = 0

    def get_job_info(self, job_id: str) -> Job:
        self.num_away -= 1
        if self.num_away >= 0:
            raise requests.ConnectionError("Connection refused")
        return super().get_job_info(job_id)

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        request: Any = SimpleNamespace(real_url="ws://h:8265")
        raise aiohttp.WSServerHandshakeError(request, (), status=500)
        yield ""


def test_a_dashboard_that_is_briefly_unreachable_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.job.submit._POLL_S", 0.01)
    cluster = Away(jobs={"a": Job("a", "FAILED", driver_exit_code=3)})
    cluster.num_away = 4
    written: list[str] = []
    assert follow(cluster, "a", written.append) == 3
    assert "the log stream of a ended" in "".join(written)


def test_a_dashboard_that_stays_unreachable_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.job.submit._POLL_S", 0.01)
    monkeypatch.setattr("deploy.job.submit._HEAD_RESTART_TIMEOUT_S", 0.05)
    cluster = Away(jobs={"a": Job("a", "RUNNING")})
    cluster.num_away = 10**6
    with pytest.raises(
        RunFailedError,
        match=r"^the cluster has not reported the state of job a for 0 s: .*Connection refused.* follows it again$",
    ):
        follow(cluster, "a", lambda _: None)


def test_the_command_submits_and_follows(
    cluster: FakeCluster, recipe_file: Path, d1: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def fake_connect(address: str | None) -> FakeCluster:
        asked.append(address)
        return cluster

    monkeypatch.setattr("deploy.job.submit.connect", fake_connect)
    cluster.jobs["tiny"] = Job("tiny", "FAILED")
    cluster.jobs["tiny-r1"] = Job("tiny-r1", "FAILED", driver_exit_code=7)
    cluster.jobs["tiny-r2"] = Job("tiny-r2", "SUCCEEDED")
    ended = d1("submit", "tiny.yaml", "--address", "http://h:8265")
    assert ended.status == 0
    assert asked == ["http://h:8265"]
    assert "job tiny-r2 has already succeeded" in ended.out
    ended = d1("submit", "tiny.yaml", "name=b", "--no-follow")
    assert ended.status == 0
    assert cluster.jobs["b"].status == "PENDING"


def test_no_cluster_at_the_address_is_refused(recipe_file: Path, d1: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    # Set here, so that monkeypatch removes what the command leaves in the environment.
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:2")
    ended = d1("submit", "tiny.yaml", "--address", "http://127.0.0.1:1")
    ended.assert_refused("no Ray cluster answers at http://127.0.0.1:1; start one")


def test_the_given_address_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:2")
    seen: list[str] = []

    def refuse(method: str, url: str, **_: Any) -> None:
        seen.append(url)
        raise ConnectionError

    monkeypatch.setattr("requests.request", refuse)
    with pytest.raises(UserError):
        connect("http://127.0.0.1:1")
    assert seen[0].startswith("http://127.0.0.1:1/")
