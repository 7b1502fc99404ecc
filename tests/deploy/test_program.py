"""Commands that d1 prints can be run as they are printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.program import command, program


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of an installation, as the running program."""
    path = tmp_path / "project" / ".venv" / "bin" / "d1"
    path.parent.mkdir(parents=True)
    path.write_text('#!/bin/sh\necho "$0 $@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(path), "train"])
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.chdir(tmp_path / "project")
    return path


def test_the_program_is_d1_if_the_path_finds_this_installation(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.defpath}")
    assert program() == "d1"


def test_the_program_is_the_script_if_the_path_finds_none_or_another(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program() == ".venv/bin/d1"
    other = tmp_path / "other"
    other.mkdir()
    (other / "d1").write_text("#!/bin/sh\n")
    (other / "d1").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}{os.pathsep}{os.defpath}")
    assert program() == ".venv/bin/d1"


def test_the_program_is_the_shorter_of_both_paths(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "/".join("abcdefghijklmnopqrstuvwxyz" * 4)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert program() == str(script)
    monkeypatch.chdir(script.parent)
    assert program() == "./d1"


def test_a_printed_command_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").rename(tmp_path / "a project")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "a project/.venv/bin/d1")])
    printed = command("train", "my recipe.yaml", "task={name: sums}")
    done = subprocess.run(["/bin/sh", "-c", printed], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "./a project/.venv/bin/d1 train my recipe.yaml task={name: sums}\n".removeprefix("./")


def test_outside_a_script_the_program_is_that_of_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.chdir(tmp_path)
    assert os.path.samefile(program(), Path(sys.executable).with_name("d1"))
