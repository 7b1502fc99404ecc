"""Starting Ray: a token private to its owner, one sentence on failure, and output in log files."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import ray_constants, services, worker

from deploy.errors import RunFailedError, UserError
from deploy.orphans import descendants
from deploy.ray_session import connect_with_retries, ray_session


@pytest.fixture
def home(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(workdir))
    # Undoes a session's changes to the environment.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    return workdir


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The umask at each start of Ray, which fails here."""
    umasks: list[int] = []

    def init(**_: Any) -> None:
        umasks.append(os.umask(0o022))
        os.umask(umasks[-1])
        raise Exception("Failed to start the raylet.\nIts stack: ...")

    monkeypatch.setattr("ray.init", init)
    return umasks


def _start() -> None:
    with ray_session(dashboard=False):
        raise AssertionError("it does not start")


def test_the_token_is_private_and_rays_files_have_the_users_umask(home: Path, inits: list[int]) -> None:
    before = os.umask(0o022)
    try:
        with pytest.raises(RunFailedError):
            _start()
    finally:
        os.umask(before)
    assert inits == [0o022] * 3, "a busy machine may need longer than Ray gives it"
    token = home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_an_existing_or_unwanted_token_is_left_alone(
    home: Path, inits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "f" * 64)):
        monkeypatch.setitem(os.environ, name, value)
        with pytest.raises(RunFailedError):
            _start()
        assert not (home / ".ray").exists()
        monkeypatch.delitem(os.environ, name)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("mine")
    with pytest.raises(RunFailedError):
        _start()
    assert (home / ".ray" / "auth_token").read_text() == "mine"


def test_an_unwritable_token_is_refused(home: Path, inits: list[int]) -> None:
    (home / ".ray").write_text("a file")
    with pytest.raises(UserError, match=r"Ray's token cannot be written to .*auth_token: .*; set RAY_AUTH_TOKEN"):
        _start()
    assert inits == []


def test_a_failed_start_of_ray_is_one_sentence_with_its_log_directory(home: Path, inits: list[int]) -> None:
    with pytest.raises(RunFailedError) as failed:
        _start()
    assert str(failed.value).startswith("Ray did not start on this machine: Failed to start the raylet.; its logs are")
    assert "\n" not in str(failed.value)


def test_our_ray_prestarts_no_workers(home: Path, inits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_prestart_worker_first_driver"
    monkeypatch.delitem(os.environ, name, raising=False)
    with pytest.raises(RunFailedError):
        _start()
    assert os.environ[name] == "0", "Ray's processes inherit it"


def test_our_ray_is_on_loopback_by_default(home: Path, inits: list[int]) -> None:
    for said, is_loopback in ((None, True), ("0", True), ("1", False)):
        os.environ.pop(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, None)
        if said is not None:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = said
        with pytest.raises(RunFailedError):
            _start()
        assert (services.get_node_ip_address() == "127.0.0.1") == is_loopback


def test_rays_notes_on_dead_workers_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "init", lambda **_: SimpleNamespace(dashboard_url=""))
    node = SimpleNamespace(get_logs_dir_path=lambda: "/")
    context = SimpleNamespace(worker=SimpleNamespace(node=node))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(worker, "_worker_logs_enabled", True)
    note: dict[str, Any] = {"lines": ["A worker died or was killed"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(dict(note), ignore_prefix=False)
    assert "A worker died" in capsys.readouterr().out, "as Ray's thread would"
    with ray_session(dashboard=False):
        worker.print_to_stdstream(note | {"lines": ["A worker died again"]}, ignore_prefix=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("in_cycle", [True, False])
def test_a_failed_start_leaves_no_process_and_no_warning(monkeypatch: pytest.MonkeyPatch, *, in_cycle: bool) -> None:
    started: list[int] = []
    said: list[Any] = []

    def connect() -> str:
        process = subprocess.Popen(["sleep", "60"])
        started.append(process.pid)
        if len(started) == 1:
            # Ray's node holds it. Depending on the error, the node is in a reference cycle or goes with the error.
            held: list[Any] = [process]
            if in_cycle:
                held.append(held)
            raise Exception("RPC error: Deadline Exceeded")
        process.kill()
        process.wait()
        return "a context"

    monkeypatch.setattr(sys, "unraisablehook", said.append)
    assert connect_with_retries(connect, 2) == "a context"
    gc.collect()
    assert len(started) == 2
    assert not set(started) & descendants(os.getpid())
    assert said == []
