"""The batch script for Slurm, with stubs in the place of Slurm, Ray and d1."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sh"
# Each stub writes its name, its arguments and what it inherits.
STUB = """#!/bin/sh
echo "$(basename "$0") $*|$RAY_ADDRESS|$RAY_AUTH_TOKEN|$D1_REDIS_URL" >> "$CALLS"
"""
STATUS = """
case "$1" in status) echo "Active:"; for node in $(seq "$(cat "$CALLS.joined")"); do echo " 1 node_$node"; done;
    echo 2 > "$CALLS.joined";; esac
"""
SRUN = 'shift 6; exec "$@"\n'


@pytest.fixture
def allocation(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on two nodes, of which the second one takes a while to join."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, more in (("ray", STATUS), ("srun", SRUN), ("d1", ""), ("python", "echo valkey-stub\n")):
        (stubs / name).write_text(STUB + more)
        (stubs / name).chmod(0o755)
    (stubs / "valkey-stub").write_text('#!/bin/sh\ncat > "$CALLS.registry"\n')
    (stubs / "valkey-stub").chmod(0o755)
    (tmp_path / "calls.joined").write_text("1")
    return {
        "PATH": f"{stubs}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "8",
    }


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash") or "bash"
    return subprocess.run(
        [bash, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_ray_runs_on_all_nodes_before_the_run_starts(allocation: dict[str, str]) -> None:
    done = _run(allocation, "recipe.yaml", "seed=3")
    assert done.returncode == 0, done.stderr
    calls = [line.split("|") for line in Path(allocation["CALLS"]).read_text().splitlines()]
    host = os.uname().nodename
    words = [call[0] for call in calls]
    assert "ray start --head --port=14321 --num-cpus=8 --dashboard-host=127.0.0.1" in words
    assert f"ray start --block --address={host}:14321 --num-cpus=8" in words
    assert any(re.match(rf"srun --nodes=1 --ntasks=1 --exclude={host} ", one) for one in words)
    assert words[-1] == "d1 train recipe.yaml seed=3 --resume-or-start", "only once both have joined"
    assert words.count("ray status") >= 2
    assert calls[-1][1] == f"{host}:14321"
    assert {len(call[2]) for call in calls if call[0].startswith(("ray", "d1"))} == {64}, "one token for all"
    password = re.fullmatch(rf"redis://:([0-9a-f]{{64}})@{host}:24321/0", calls[-1][3])
    assert password is not None
    assert f"requirepass {password[1]}" in Path(allocation["CALLS"] + ".registry").read_text()


def test_without_a_recipe_it_says_how_to_call_it(allocation: dict[str, str]) -> None:
    done = _run(allocation)
    assert (done.returncode, done.stderr) == (2, "usage: sbatch --nodes=N deploy/slurm.sh RECIPE [KEY=VALUE ...]\n")
