"""Evaluation prompts longer than those of the rounds: answered in full, or counted as wrong and named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.batching import evaluation_batches
from actors.coordination.coordinator import Coordinator
from actors.coordination.version_evaluator import VersionEvaluator
from actors.grader import GraderWorker
from actors.messages import WeightsId, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.run_log import read_events
from actors.spec import RunSpec
from actors.training.sft.data import load_sft_data
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rewards.tasks.jsonl import JsonlConfig
from rollout.sampler import Sampler

LONG, TOO_LONG = "x" * 14, "x" * 40
"""Prompts of the rounds have at most 12 tokens; with eight slots to fill, the policy has room for 24."""


@pytest.fixture
def of(spec: RunSpec, tmp_path: Path) -> Callable[..., RunSpec]:
    """Return the run on problems of a file, with 20 held-out ones, the first of which begin with the given texts."""

    def make(*before: str, **rollout: Any) -> RunSpec:
        heads = [*before, *[""] * (20 - len(before))]
        held_out = [{"prompt": f"{head}{index % 7}", "answer": str(index)} for index, head in enumerate(heads, 10)]
        # The first character makes the texts distinct.
        held_out = [{**row, "prompt": f"{chr(ord('A') + at)}{row['prompt']}"} for at, row in enumerate(held_out)]
        train = [{"prompt": f"{chr(ord('a') + at % 26)}{at}", "answer": "7"} for at in range(50)]
        for name, rows in (("held", held_out), ("train", [*train, {"prompt": "y" * 14, "answer": "7"}])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = JsonlConfig(grader="exact", train_data=tmp_path / "train.jsonl", heldout_data=tmp_path / "held.jsonl")
        changed = spec.rollout.model_copy(update=rollout)
        return spec.model_copy(update={"task": task, "rollout": changed, "num_train_problems": 51})

    return make


def _plan(spec: RunSpec) -> RunPlan:
    return RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))


def _work_units(spec: RunSpec) -> list[WorkUnit]:
    return _plan(spec).evaluation_work_units(spec.rollout.sampling, load_config(spec.initial_checkpoint))


class _Pools:
    """A sampler and a grader in this process."""

    def __init__(self, spec: RunSpec) -> None:
        self._sampler = Sampler(load_policy(spec.initial_checkpoint), 1)
        self._grader = GraderWorker(spec.task, spec.reward, spec.initial_checkpoint)

    async def score(
        self, weights_id: WeightsId, key: WorkUnitKey, make: Callable[[], WorkUnit], due: float
    ) -> tuple[None, WorkUnitSummary]:
        work_unit = make()
        return None, self._grader.grade(work_unit, self._sampler.generate(work_unit.requests))[1]


def _scored(spec: RunSpec) -> dict[str, Any]:
    evaluation = VersionEvaluator(spec, _plan(spec), _Pools(spec), lambda *_: None)  # type: ignore[arg-type]
    return asyncio.run(evaluation.score(WeightsId(version=1, digest=""), "rl", due=0))


def test_long_prompts_are_evaluated_too(of: Callable[..., RunSpec]) -> None:
    spec = of(*[LONG] * 5)
    work_units, short = _work_units(spec), _work_units(of())
    assert [(len(work_unit.requests), work_unit.is_long) for work_unit in work_units] == [
        (8, False),
        (7, False),
        # Eight canvases of 12 and 8 tokens exceed five of 18 and 8; these stay within that limit.
        (5, True),
    ]
    prompts = [len(request.prompt_ids) for work_unit in work_units for request in work_unit.requests]
    assert max(prompts[:15]) <= 12 < min(prompts[15:])
    assert len({work_unit.key for work_unit in work_units}) == 3
    scored = _scored(spec)
    assert (scored["num_problems"], scored["num_items"], scored["mean_steps"]) == (20, 20, 4)
    assert "without_room" not in scored
    assert [len(work_unit.requests) for work_unit in short] == [8, 8, 4]


def test_long_prompts_do_not_change_the_order_of_short_ones(of: Callable[..., RunSpec]) -> None:
    spec = of(LONG, "", LONG, LONG)
    plan = _plan(spec)
    short = [problem for problem in plan.heldout if len(plan.prompt_ids(problem)) <= 12]
    asked = [list(work_unit.problems) for work_unit in _work_units(spec)]
    assert asked[:3] == [short[:8], short[8:16], short[16:]]


def test_a_problem_without_room_counts_as_wrong_and_is_listed(of: Callable[..., RunSpec]) -> None:
    spec = of(TOO_LONG, LONG, TOO_LONG)
    plan, policy = _plan(spec), load_config(spec.initial_checkpoint)
    names = [plan.heldout[index].problem_id for index in range(20) if len(plan.prompt_ids(plan.heldout[index])) > 24]
    assert len(names) == 2
    assert [problem.problem_id for problem in plan.without_room(spec.rollout.sampling, policy)] == names
    scored = _scored(spec)
    assert (scored["num_problems"], scored["num_items"]) == (20, 20)
    assert scored["without_room"] == scored["schedules"]["4 steps"]["without_room"] == names


def test_an_evaluation_without_any_answer_is_refused(of: Callable[..., RunSpec]) -> None:
    spec = of(*[TOO_LONG] * 20)
    with pytest.raises(ValueError, match="every evaluation prompt of task jsonl is too long: with 8 slots of a compl"):
        _work_units(spec)


def test_training_drops_long_prompts_and_truncation_is_the_same_everywhere(of: Callable[..., RunSpec]) -> None:
    spec = of(LONG, TOO_LONG)
    plan = _plan(spec)
    assert (len(plan.train), len(plan.heldout), plan.num_overlong) == (50, 20, 1)
    assert len(plan.loss_problems) == 18
    sft = spec.sft.model_copy(update={"num_eval": 20})
    spec = spec.model_copy(update={"sft": sft})
    data = load_sft_data(spec, plan, ChatTokenizer(spec.initial_checkpoint))
    assert data.facts["num_held_out"] == 18
    cut = of(LONG, TOO_LONG, overlong_prompts="truncate_left")
    assert _plan(cut).num_overlong == 3
    assert max(len(request.prompt_ids) for work_unit in _work_units(cut) for request in work_unit.requests) == 12


def test_the_run_log_reports_prompts_that_are_too_long(of: Callable[..., RunSpec], tmp_path: Path) -> None:
    spec = of(TOO_LONG, LONG)
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "initial").symlink_to(spec.initial_checkpoint)
    name = _plan(spec).without_room(spec.rollout.sampling, load_config(spec.initial_checkpoint))[0].problem_id

    async def begin() -> None:
        spec_of_run = spec.model_copy(update={"run_dir": run_dir})
        url = "redis://127.0.0.1:1/0"
        coordinator = Coordinator(spec_of_run, {}, {}, None, registry_url=url, store_name="store", driver="one")
        await coordinator._log.written()

    asyncio.run(begin())
    assert [event["what"] for event in read_events(run_dir) if event["event"] == "failure"] == [
        "1 prompts are longer than rollout.max_prompt_tokens 12 and not trained on",
        "1 evaluation problems count as wrong, as their prompts leave no room for 8 slots in the policy's 32 tokens: "
        + name,
    ]


@pytest.mark.parametrize(
    ("prompts", "batches"),
    [
        ([], []),
        ([3, 4, 3], [(0, 1), (2,)]),
        # Two canvases of 4 and 4 tokens are as large as one of 12 and 4.
        ([12, 3, 9, 4, 4], [(1, 3), (4,), (0,), (2,)]),
        ([5, 5, 5, 3], [(3,), (0,), (1,), (2,)]),
        ([99], [(0,)]),
    ],
)
def test_work_units_of_long_prompts_have_no_more_tokens(prompts: list[int], batches: list[tuple[int, ...]]) -> None:
    assert evaluation_batches(prompts, 2, 4, 4) == batches
