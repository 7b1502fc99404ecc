"""What the processes of a cluster import: torch takes seconds of CPU and 230 MB in each of them."""

import pickle
import subprocess
import sys

import pytest

from actors.plan import RunPlan
from actors.spec import RunSpec

_GRADE = """
import pickle, sys
from actors.grader import GraderWorker
task, reward, checkpoint, portion = pickle.load(sys.stdin.buffer)
GraderWorker(task, reward, checkpoint).grade(portion, [])
"""
_SEEN = "\nimport sys; print('torch' in sys.modules)"


def _prints(program: str, given: bytes = b"") -> str:
    ran = subprocess.run([sys.executable, "-c", program + _SEEN], input=given, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode().strip()


@pytest.mark.parametrize("module", ["actors.weight_store", "actors.registry_server"])
def test_what_holds_no_tensor_imports_no_torch(module: str) -> None:
    assert _prints(f"import {module}") == "False"


def test_a_grader_imports_no_torch(spec: RunSpec, plan: RunPlan) -> None:
    portion = plan.round_portion(0, 0)
    empty = type(portion)(key=portion.key, problems=(), group_ids=(), requests=())
    given = pickle.dumps((spec.task, spec.reward, spec.initial_checkpoint, empty))
    assert _prints(_GRADE, given) == "False"
