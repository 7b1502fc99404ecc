"""Tests of the end-to-end GPU benchmark: refusal without a GPU, and tables of partial runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.end_to_end import __main__ as command
from benchmarks.gpu.end_to_end import large, small
from benchmarks.gpu.end_to_end.commands import ROOT, carried_out
from benchmarks.gpu.end_to_end.table import Table
from benchmarks.gpu.end_to_end.visit import StageError, Visit
from deploy.recipe.overrides import load_recipe

_HEAD = "| stage | what | measured | beside it |\n|---|---|---|---|\n"


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    table = Table(tmp_path / "test-gpu.md", "a machine")
    return Visit(device="cpu", out=tmp_path / "runs", table=table, ends_at=time.monotonic() + 60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is a GPU")
def test_without_a_gpu_it_exits_with_status_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu.end_to_end", "--out", str(tmp_path / "out")]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "d1: torch sees no GPU on this machine, and test-gpu measures one; --rehearse runs on the CPU\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_failed_stage_is_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def fails(visit: Visit) -> None:
        visit.row("before", "1 s")
        raise StageError("a traceback\nd1: no room | here")

    def looks(visit: Visit) -> None:
        seen.append(visit.table.path.read_text())
        visit.row("a number", "2 s", "plan 3 s")

    stages = {"first": command.Stage(fails, 60), "second": command.Stage(looks, 60)}
    monkeypatch.setattr(command, "STAGES", stages)
    monkeypatch.setattr("sys.argv", ["test-gpu", "--rehearse", "--out", str(tmp_path)])
    for visits in (1, 2):
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == 1
        assert seen[-1].endswith("| first | seconds of the stage | 0.0 s |  |\n"), "each row is there at once"
        titles = (tmp_path / "test-gpu.md").read_text().split("## ")
        assert len(titles) == 1 + visits, "a visit is a table behind those before"
        heading, _, rows = titles[-1].partition("\n\n")
        assert "rehearsal on the CPU" in heading
        assert rows == _HEAD + (
            "| first | before | 1 s |  |\n"
            "| first | failed | d1: no room \\| here |  |\n"
            "| first | seconds of the stage | 0.0 s |  |\n"
            "| second | a number | 2 s | plan 3 s |\n"
            "| second | seconds of the stage | 0.0 s |  |\n"
        )
    assert "| second | a number | 2 s | plan 3 s |\n" in capsys.readouterr().out


def test_stages_and_the_visit_have_time_limits(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = command.Stage(lambda visit: visit.row("waited", str(visit.wait_until(lambda: False, "a train"))), 0.3)
    monkeypatch.setattr(command, "STAGES", {"waits": waits})
    command.carry_out(visit, "waits", time.monotonic() + 60)
    command.carry_out(visit, "waits", time.monotonic())
    text = visit.table.path.read_text()
    assert "| waits | failed | its time was over while it waited for a train |" in text
    assert text.endswith("| waits | failed | the visit's time was over before it began |  |\n")


def test_a_failed_command_reports_its_last_line(visit: Visit) -> None:
    with pytest.raises(StageError, match=r"^d1: cannot read the recipe nowhere\.yaml"):
        carried_out(visit, "train", "nowhere.yaml")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_recipes_of_the_stages_are_valid(visit: Visit, device: str) -> None:
    visit.device = device
    gpus = "gpus={sampler: 0.5, learner: 0.5, colocate: true}"
    _, recipe, *overrides = small.words_of(visit, "run", f"device={device}", *[gpus] * (device == "cuda"))
    assert load_recipe(Path(recipe), overrides).device == device
    changed = large.overrides_of(visit)
    assert load_recipe(large.RECIPE, changed).model.lora.rank
    assert load_recipe(large.RECIPE, changed).device == device


def _events(sft_loss: float) -> list[dict[str, Any]]:
    evaluated = {"event": "evaluation", "num_correct": 55, "num_problems": 100, "time_s": 9.0}
    seconds = {"sampling_s": 0.25, "training_s": 0.5, "publish_s": 0.125}
    return [
        {"event": "sft", "loss": sft_loss},
        {**evaluated, "label": "sft"},
        {"event": "round", "reward": 0.5, "token_logp": -1.0, **seconds},
        {**evaluated, "label": "rl"},
    ]


def test_a_run_that_differs_from_the_cpus_fails_with_both_numbers(visit: Visit) -> None:
    visit.stage = "shares"
    on_cpu = small.facts_of(_events(0.05))
    small.tell_run(visit, _events(0.06), on_cpu)
    text = visit.table.path.read_text()
    assert "| shares | sampling_s, median of 1 rounds | 0.250 s |  |\n" in text
    assert "| shares | loss at the end of SFT | 0.0600 | cpu 0.0500 |\n" in text
    assert "| shares | accuracy at the end | 0.5500 | cpu 0.5500 |\n" in text
    with pytest.raises(StageError, match=r"^loss at the end of SFT is 0\.0900, and on the CPU it was 0\.0500$"):
        small.tell_run(visit, _events(0.09), on_cpu)
