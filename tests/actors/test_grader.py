import pickle
import subprocess
import sys
from dataclasses import replace

from actors.plan import RunPlan
from actors.spec import RunSpec

_GRADE = """
import pickle, sys
from actors.grader import GraderWorker
task, reward, checkpoint, portion = pickle.load(sys.stdin.buffer)
GraderWorker(task, reward, checkpoint).grade(portion, [])
print('torch' in sys.modules)
"""


def test_a_grader_does_not_import_torch(spec: RunSpec, plan: RunPlan) -> None:
    empty = replace(plan.round_work_unit(0, 0), problems=(), group_ids=(), requests=())
    given = pickle.dumps((spec.task, spec.reward, spec.initial_checkpoint, empty))
    ran = subprocess.run([sys.executable, "-c", _GRADE], input=given, capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"False\n"), ran.stderr.decode()
