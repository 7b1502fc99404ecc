"""Tests of the GPU benchmark on a tiny setting: all stages measure, and fail independently."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import update
from benchmarks.gpu.counting import OpCounter
from benchmarks.gpu.setting import full, tiny
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.step import rows
from learner.model.transformer import Transformer
from learner.parallel import sharding
from rollout import sampler as rollout_sampler

Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[2]
# The dependencies of d1 on a minimal GPU machine: torch, transformers, pydantic and structlog, with their own.
BARE = {
    *("torch", "transformers", "pydantic", "structlog"),
    *("huggingface-hub", "jinja2", "numpy", "packaging", "pyyaml", "safetensors", "tokenizers"),
}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command with generous time limits. Returns its exit code, saved rows and output."""
    patient = {name: replace(stage, limit_s=600) for name, stage in STAGES.items()}
    monkeypatch.setattr(command, "STAGES", patient)

    def run(*arguments: str) -> tuple[Any, Rows, str]:
        out = tmp_path / "rows.jsonl"
        monkeypatch.setattr("sys.argv", ["gpu", "--tiny", "--out", str(out), *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code, [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", [name for name in STAGES if name != "gpu_tests"])
def test_every_stage_measures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation is skipped: it takes half a minute and is tested elsewhere."""
    monkeypatch.setattr(rollout_sampler, "_compiled", lambda model: model)
    monkeypatch.setattr(sharding, "compile_blocks", lambda model: None)
    for module in (sharding, rollout_sampler):
        monkeypatch.setattr(module, "fuse_elementwise", lambda model: None)
    rows = list(STAGES[name].rows(tiny("cpu")))
    assert (
        len(rows) == {"ceilings": 10, "precision": 4, "sampler": 22, "learner": 7, "publishing": 3, "engine": 3}[name]
    )
    for row in rows:
        numbers = {key: value for key, value in row.items() if key not in ("what", "of_stated", "of_limit", "mfu")}
        assert numbers
        assert all(math.isfinite(value) for value in numbers.values()), row
        assert all(value > 0 for key, value in numbers.items() if key.endswith(("_per_s", "seconds", "_s"))), row
    if name == "precision":
        exact, half = rows[1:3]
        assert exact["largest_gap_nats"] < 1e-4 < half["largest_gap_nats"]
        assert rows[3]["share"] == 1.0, "here both are eager"


@pytest.mark.nightly
def test_rows_are_written_immediately_and_a_failed_stage_says_why(measured: Callable[..., Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("here cuda would not fail")
    code, rows, said = measured("--device", "cpu", "--stages", "publishing")
    assert (code, [row["stage"] for row in rows]) == (False, ["publishing"] * 3)
    assert "publishing  its checksums" in said
    code, rows, said = measured("--device", "cuda", "--stages", "ceilings")
    assert code is True
    assert [row["stage"] for row in rows[3:]] == ["ceilings"], "after what the file has"
    assert "ceilings    failed: AssertionError: Torch not compiled with CUDA enabled" in said


def test_the_benchmark_runs_without_the_services_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=]", dependency)[0] for dependency in project["dependencies"]}
    assert names > BARE
    missing = {"ray", "redis", "fastapi", "starlette", "uvicorn"} | (names - BARE)
    code = (
        "import sys\n"
        # Python refuses to import a module whose entry is None.
        f"sys.modules |= dict.fromkeys({sorted(name.replace('-', '_') for name in missing)})\n"
        "from benchmarks.gpu.stages import main\n"
        "sys.argv = ['stages', 'engine', '--device', 'cpu', '--tiny']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 3


def test_stages_have_time_limits(measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "STAGES", {"ceilings": replace(STAGES["ceilings"], limit_s=0.2)})
    code, rows, _ = measured("--device", "cpu", "--stages", "ceilings")
    assert (code, rows) == (True, [{"stage": "ceilings", "failure": "it was ended after 0 s"}])
    code, rows, _ = measured("--device", "cpu", "--stages", "ceilings", "--seconds", "0")
    assert rows[1] == {"stage": "ceilings", "failure": "the 0 s of all stages were over"}


def test_the_full_setting_is_llada_8b_and_takes_at_most_ten_minutes() -> None:
    setting = full("cuda")
    with torch.device("meta"):
        model = Transformer(setting.shape.config(setting.canvas_tokens))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(8.0e9, rel=0.01)
    assert sum(stage.limit_s for stage in STAGES.values()) <= 600


def test_a_step_needs_no_attention_mask() -> None:
    steps = rows(tiny("meta"), 3, temperature=0.9)
    assert [(row["masked"], row["attention"], row["waits"]) for row in steps] == [(0, 2, 1)] * 6
    for plain, fused in zip(steps[::2], steps[1::2], strict=True):
        # In each of two layers: rotation of queries and keys, residual and norm, SwiGLU.
        assert plain["launches"] - fused["launches"] == 2 * ((3 - 1) * 2 + 1 + 1)
        assert fused["gigabytes"] < plain["gigabytes"]


def test_packed_rows_have_neither_padding_nor_mask() -> None:
    setting = update.setting_of(tiny("meta").shape, 8, 2)
    padded, back_to_back, fused = update.rows(setting, [3000])
    assert padded["slots"] * (1 - padded["padding"]) == pytest.approx(back_to_back["slots"])
    assert padded["padding"] > 0.03
    assert padded["micro_batches"] > back_to_back["micro_batches"], "more of them fit"
    assert (padded["masked"], back_to_back["masked"]) == (4, 0), "two layers; the last of three has rows of one length"
    for row in (padded, back_to_back):
        assert (row["attention"], row["waits"]) == (2 * row["micro_batches"], 0)
    for fewer in ("launches", "gigabytes"):
        assert fused[fewer] < back_to_back[fewer] < padded[fewer]


def test_only_device_operations_are_counted() -> None:
    there, counter = torch.empty(4, 6, device="meta"), OpCounter()
    with counter:
        there.transpose(0, 1).unflatten(0, (2, 3))
        torch.ones(5).add_(1)
    assert counter.num_launches == 0, "views, and what is on the CPU"
    with counter:
        there + torch.empty(6, device="meta")
        there @ there.T
        there.T.reshape(-1)
        there.to(torch.bfloat16)
    assert counter.num_launches == 4
    assert counter.num_bytes == (96 + 24 + 96) + (96 + 96) + (96 + 48)
    with counter:
        torch.add(there, 1, out=torch.empty(4, 6, device="meta"))
        there[torch.empty(2, dtype=torch.int64, device="meta")]
    assert counter.num_bytes == (96 + 24 + 96) + (96 + 96) + (96 + 48) + (96 + 96) + 2 * 48
    with counter:
        torch.ones(3).to("meta")
        torch.ones(3).to("meta", non_blocking=True)
    assert (counter.num_blocking_uploads, counter.num_waits) == (1, 0)
