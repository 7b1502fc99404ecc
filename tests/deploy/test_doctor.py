"""`d1 doctor`: what is wrong with a machine, and what would fix it."""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy import doctor
from deploy.doctor import Check, CheckOutcome


def _named(name: str) -> Check:
    return dict(doctor.run_checks(Path("runs")))[name]


@pytest.fixture(autouse=True)
def _without_slow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_embedded_registry", lambda: Check(""))


def test_this_machine_passes_every_check(workdir: Path, d1: Callable) -> None:
    ended = d1("doctor")
    assert ended.status == 0
    for name in ("cores", "memory", "port 8265", "packages", "GPUs", "code sandbox"):
        assert f"│ {name} " in ended.out
    assert "0 failed" in ended.out
    assert list(workdir.iterdir()) == []


def test_a_failed_check_is_exit_status_1(d1: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    # One short row: a long one wraps where other rows' lengths say.
    installed = metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0" if name == "ray" else installed(name))
    ended = d1("doctor")
    assert ended.status == 1
    assert "ray 1.0" in ended.out
    assert "1 failed" in ended.out


def test_package_versions_are_compared_with_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    torch = next(Requirement(item) for item in wanted if item.startswith("torch"))
    oldest = next(item.version for item in torch.specifier if item.operator == ">=")
    installed = metadata.version
    for given, verdict in {oldest: CheckOutcome.OK, "2.10.9": CheckOutcome.FAILED}.items():
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name, given=given: given if name == "torch" else installed(name)
        )
        assert _named("packages").outcome is verdict
    assert _named("packages").fix == f"pip install '{torch}'"


@pytest.mark.parametrize("is_installed", [False, True], ids=["no metadata", "metadata without dependencies"])
def test_packages_are_a_warning_without_the_metadata_that_lists_them(
    is_installed: bool, d1: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when d1 is only on the PYTHONPATH, or was packaged by hand."""

    def requires(name: str) -> None:
        if not is_installed:
            raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", requires)
    ended = d1("doctor")
    assert ended.status == 0
    check = _named("packages")
    assert check.outcome is CheckOutcome.WARNING
    assert check.found.startswith("Python 3")
    assert "package metadata" in check.fix


def test_a_check_that_raises_has_failed_and_the_others_still_run(d1: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(doctor.run_checks(Path("runs"))).keys()

    def refuses(*_: object) -> None:
        raise PermissionError("not for you\nat all")

    for source in (doctor.machine, doctor, doctor.shutil, metadata):
        for name in ("num_cpus", "memory_bytes", "free_bytes", "num_gpus", "requires", "_embedded_registry", "which"):
            if hasattr(source, name):
                monkeypatch.setattr(source, name, refuses)
    ended = d1("doctor")
    assert ended.status == 1
    assert "7 failed" in ended.out
    checks = dict(doctor.run_checks(Path("runs")))
    assert checks.keys() == whole
    assert {check.found for check in checks.values() if check.outcome is CheckOutcome.FAILED} == {
        "PermissionError: not for you"
    }


def test_a_warning_is_no_failure(d1: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "num_cpus", lambda: 1)
    ended = d1("doctor")
    assert ended.status == 0
    assert "use a machine with 2 or more cores" in ended.out


@pytest.mark.parametrize(
    ("gibibytes", "verdict"), [(1, CheckOutcome.FAILED), (4, CheckOutcome.WARNING), (16, CheckOutcome.OK)]
)
def test_memory(gibibytes: int, verdict: CheckOutcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "memory_bytes", lambda: gibibytes * 2**30)
    assert _named("memory").outcome is verdict


def test_too_little_shared_memory_names_dockers_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "shared_memory_bytes", lambda: 64 * 2**20)
    check = _named("/dev/shm")
    assert check.outcome is CheckOutcome.WARNING
    assert "--shm-size" in check.fix
    monkeypatch.setattr(doctor.machine, "shared_memory_bytes", lambda: None)
    assert _named("/dev/shm").outcome is CheckOutcome.NOTE


def test_a_port_in_use_is_a_warning() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        check = doctor._port(server.getsockname()[1], "the service")
    assert check.outcome is CheckOutcome.WARNING
    assert check.found == "address already in use, wanted for the service"


def test_a_redis_that_does_not_answer_fails_without_showing_its_password(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, d1: Callable
) -> None:
    monkeypatch.setenv("D1_REDIS_URL", "redis://:s3cret@127.0.0.1:1")
    ended = d1("doctor")
    assert ended.status == 1
    assert "D1_REDIS_URL" in ended.out
    assert "s3cret" not in ended.out + ended.err
    monkeypatch.setenv("D1_REDIS_URL", "not a url")
    assert _named("D1_REDIS_URL").outcome is CheckOutcome.FAILED


def test_cgroup_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert doctor.machine.num_cpus() == 1
    assert doctor.machine.memory_bytes() == 2**30
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.machine.num_cpus() >= 1
    assert doctor.machine.memory_bytes() > 2**30
