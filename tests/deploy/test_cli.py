"""The `d1` command: quick help, exit statuses, and how it starts a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.recipe.recipe import Stages
from learner.model.config import TransformerConfig
from learner.model.families.llada import write_config
from tests.processes import d1_in_bash

Events = list[dict[str, Any]]
_ROOT = Path(__file__).parents[2]
_MAIN = "from deploy.cli import main; main()"


def _python(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(_ROOT)!r}); {code}", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class FakeJob:
    """Fake of `deploy.job.job.run` that records its arguments and replays events."""

    def __init__(self, events: Events, interrupt: bool = False) -> None:
        self.events, self.interrupt, self.calls = events, interrupt, []

    def run(self, recipe: Any, *, stages: Any, start_from: Any, resume: Any, serve: Any, on_event: Any) -> None:
        self.calls.append((stages, start_from, resume, serve))
        recipe.run_dir.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(event) + "\n" for event in self.events)
        (recipe.run_dir / "metrics.jsonl").write_text(text)
        for event in self.events:
            on_event(event)
        if self.interrupt:
            raise KeyboardInterrupt


@pytest.fixture
def install_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeJob], FakeJob]:
    def install(job: FakeJob) -> FakeJob:
        module = types.ModuleType("deploy.job.job")
        module.run = job.run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deploy.job.job", module)
        monkeypatch.setattr("deploy.job.job", module, raising=False)
        return job

    return install


def test_help_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    heavy = "{'torch', 'ray', 'transformers', 'matplotlib', 'fastapi', 'pydantic'}"
    code = f"import deploy.cli; print(sorted({heavy} & set(sys.modules)))"
    assert _python(code, cwd=tmp_path).stdout == "[]\n"
    ended = _python(_MAIN, "--help", cwd=tmp_path)
    assert ended.returncode == 0
    for command in ("train", "sft", "submit", "sample", "serve", "doctor", "schema", "runs", "status"):
        assert f" {command} " in ended.stdout


def test_a_refusal_of_the_real_command_is_one_sentence(recipe_file: Path) -> None:
    # Silences the messages about slow imports on a busy machine.
    quiet = f"import deploy.wait_display; deploy.wait_display.EVERY_S = 600; {_MAIN}"
    ended = _python(quiet, "train", "tiny.yaml", "learner.lr=-1", cwd=recipe_file.parent)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == "d1: the override learner.lr=-1: learner.lr is -1; it should be greater than 0\n"


@pytest.mark.parametrize("words", [["bla"], ["train"], ["train", "x.yaml", "--bla"], ["serve", "x", "--port", "0"]])
def test_a_usage_error_is_exit_status_2(words: list[str], d1: Callable) -> None:
    ended = d1(*words)
    assert ended.status == 2
    assert "Usage: d1" in ended.err


def test_train_runs_all_stages_and_prints_the_result(
    recipe_file: Path, d1: Callable, events: Events, install_job: Callable
) -> None:
    job = install_job(FakeJob(events))
    ended = d1("train", "tiny.yaml")
    assert ended.status == 0
    assert job.calls == [(Stages.ALL, None, False, False)]
    assert "RL 1/12 rounds" in ended.out
    assert ended.out.index("done in") < ended.out.index("SFT + RL")
    assert ended.out.endswith(f"run directory: {recipe_file.parent}/runs/tiny\n")


def test_sft_runs_stage_1(recipe_file: Path, d1: Callable, install_job: Callable) -> None:
    job = install_job(FakeJob([]))
    assert d1("sft", "tiny.yaml").status == 0
    assert job.calls == [(Stages.SFT, None, False, False)]
    d1("sft", "tiny.yaml", "sft.num_steps=0").assert_refused("sft.num_steps is 0")


def test_from_skips_sft(recipe_file: Path, d1: Callable, install_job: Callable, config: TransformerConfig) -> None:
    job = install_job(FakeJob([]))
    refused = d1("train", "tiny.yaml", "--from", "nowhere")
    refused.assert_refused("--from nowhere: ", "is no directory, and no hub id either")
    assert job.calls == []
    (recipe_file.parent / "somewhere").mkdir()
    (recipe_file.parent / "somewhere" / "config.json").write_text(json.dumps(write_config(config)))
    assert d1("train", "tiny.yaml", "--from", "somewhere").status == 0
    assert job.calls == [(Stages.RL, Path("somewhere"), False, False)]


def test_control_enables_the_control_and_needs_sft(recipe_file: Path, d1: Callable, install_job: Callable) -> None:
    install_job(FakeJob([], interrupt=True))
    recipe_file.write_text(recipe_file.read_text() + "control: {enabled: false}\n")
    assert "control:\n  enabled: false\n" in d1("train", "tiny.yaml", "--dry-run").out
    assert "control:\n  enabled: true\n" in d1("train", "tiny.yaml", "--control", "--dry-run").out
    ended = d1("train", "tiny.yaml", "--control")
    assert ended.out.endswith("stopped; resume with: d1 train tiny.yaml --control --resume\n")
    d1("train", "tiny.yaml", "--control", "--from", "sft").assert_refused("--control is more SFT, which --from skips")


def test_resume_needs_a_run_and_resume_or_start_does_not(
    recipe_file: Path, d1: Callable, install_job: Callable, make_run: Callable
) -> None:
    job = install_job(FakeJob([]))
    d1("train", "tiny.yaml", "--resume").assert_refused("there is no run tiny in", "start it without --resume")
    assert job.calls == []
    assert d1("train", "tiny.yaml", "--resume-or-start").status == 0
    assert d1("train", "tiny.yaml", "--resume-or-start").status == 0
    assert d1("train", "tiny.yaml", "--resume").status == 0
    assert [resume for _, _, resume, _ in job.calls] == [False, True, True]


def test_a_run_that_skipped_sft_is_resumed_without_naming_its_start(
    recipe_file: Path, d1: Callable, install_job: Callable, config: TransformerConfig
) -> None:
    job = install_job(FakeJob([{"event": "run", "stages": "rl"}]))
    initial = recipe_file.parent / "runs" / "tiny" / "checkpoints" / "initial"
    initial.mkdir(parents=True)
    (initial / "config.json").write_text(json.dumps(write_config(config)))
    (initial.parents[1] / "metrics.jsonl").write_text('{"event": "run", "stages": "rl"}\n')
    for words in ((), ("--from", "deleted-meanwhile")):
        assert d1("train", "tiny.yaml", "--resume", *words).status == 0
    assert job.calls == [(Stages.RL, initial, True, False)] * 2


def test_ctrl_c_says_how_to_resume(recipe_file: Path, d1: Callable, events: Events, install_job: Callable) -> None:
    install_job(FakeJob(events[:20], interrupt=True))
    ended = d1("train", "tiny.yaml", "task={name: sums}")
    assert ended.status == 130
    assert ended.out.endswith("stopped; resume with: d1 train tiny.yaml 'task={name: sums}' --resume\n")
    assert "Traceback" not in ended.err


def test_resumed_through_the_link_it_is_the_run_itself(
    recipe_file: Path, d1: Callable, events: Events, install_job: Callable, make_run: Callable
) -> None:
    from deploy.runs.listing import point_latest_at

    point_latest_at(make_run("mine", events[:20]))
    install_job(FakeJob(events[:20], interrupt=True))
    ended = d1("train", "tiny.yaml", "name=latest", "--resume")
    assert ended.out.endswith("stopped; resume with: d1 train tiny.yaml name=latest name=mine --resume\n")


def test_a_command_is_printed_as_this_user_can_run_it(
    recipe_file: Path, d1: Callable, events: Events, install_job: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    install_job(FakeJob(events[:20], interrupt=True))
    script = os.path.relpath(Path(sys.executable).with_name("d1"))
    absolute = str(Path(sys.executable).with_name("d1"))
    printed = d1("train", "tiny.yaml").out.splitlines()[-1]
    assert printed == f"stopped; resume with: {min(script, absolute, key=len)} train tiny.yaml --resume"
    d1("status", "x").assert_refused(f"`{min(script, absolute, key=len)} runs ls` lists the runs")


def test_ctrl_c_that_ends_only_the_service_of_a_finished_run_is_success(
    recipe_file: Path, d1: Callable, events: Events, install_job: Callable
) -> None:
    job = install_job(FakeJob(events, interrupt=True))
    ended = d1("train", "tiny.yaml", "--serve", "service.port=18732")
    assert ended.status == 0
    assert job.calls == [(Stages.ALL, None, False, True)]
    assert "SFT + RL" in ended.out
    assert "stopped" not in ended.out


def test_a_bug_shows_its_traceback(recipe_file: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.cli import main

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("deploy.recipe.overrides.load_recipe", broken)
    monkeypatch.setattr(sys, "argv", ["d1", "train", "tiny.yaml"])
    with pytest.raises(ZeroDivisionError):
        main()


@pytest.mark.parametrize("words", [["schema"], ["train", str(_ROOT / "recipes" / "tiny.yaml"), "--dry-run"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_reported_in_one_sentence(
    words: list[str], unbuffered: str, tmp_path: Path
) -> None:
    for redirect, message in (
        (">/dev/full", "standard output takes no more: no space left on device"),
        (">&-", "standard output is closed; redirect it to a file or to /dev/null"),
    ):
        done = d1_in_bash(f'"$@" {redirect}', *words, unbuffered=unbuffered, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"d1: {message}\n")


def test_a_reader_that_leaves_early_causes_no_message(tmp_path: Path) -> None:
    done = d1_in_bash('"$@" | head -n 1', "schema", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("{\n", "")
