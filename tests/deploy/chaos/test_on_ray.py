"""A real run of a small recipe, its processes killed: the history is the undisturbed one's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.nightly]

ROOT = Path(__file__).parents[3]
D1 = str(Path(sys.executable).with_name("d1"))


@pytest.mark.parametrize("oversampling", [1, 2])
def test_killed_samplers_graders_and_learners_and_scaled_pools_change_no_bit(tmp_path: Path, oversampling: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    only = [word for role in ("sampler", "grader", "learner", "pool") for word in ("--only", role)]
    words = [D1, "chaos", str(ROOT / "recipes" / "chaos.yaml"), "learner.num_rounds=60", "evaluation.num_problems=20"]
    words += [
        f"rollout.max_oversampling={oversampling}",
        "--kills",
        "6",
        "--seed",
        "1",
        "--out",
        str(tmp_path / "session"),
        "--json",
        *only,
    ]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert len(found["faults"]) == 6, done.stderr
    assert {fault["target"] for fault in found["faults"]} == {"sampler", "grader", "learner", "pool"}
    # How long a busy machine takes to start a process is no matter of this test.
    assert [what for what in found["violations"] if "without a word" not in what] == [], done.stderr
    assert json.loads((tmp_path / "session" / "report.json").read_text()) == found
    assert "| learner | SIGKILL |" in (tmp_path / "session" / "report.md").read_text()
