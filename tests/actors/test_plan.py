import pytest

from actors.plan import RunPlan
from actors.spec import RunSpec
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rollout.config import RolloutConfig


def test_planning_a_round_is_deterministic(spec: RunSpec, plan: RunPlan) -> None:
    again = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))
    assert again.round_work_unit(3, 1) == plan.round_work_unit(3, 1)


def test_work_units_hold_whole_groups_and_every_group_once(plan: RunPlan) -> None:
    work_units = [plan.round_work_unit(0, index) for index in range(plan.work_units_per_round)]
    groups = [group for work_unit in work_units for group in work_unit.group_ids]
    assert groups == [group for group in range(5) for _ in range(4)]
    assert [len(work_unit.requests) for work_unit in work_units] == [8, 8, 4]


@pytest.mark.parametrize(
    ("num_samplers", "batch_size", "sizes"),
    [
        (1, 8, [2, 2, 1]),
        (1, 64, [5]),
        (2, 64, [3, 2]),
        (3, 64, [2, 2, 1]),
        (4, 64, [2, 2, 1]),
        (5, 64, [1] * 5),
        (9, 64, [1] * 5),
    ],
)
def test_a_round_is_divided_among_all_samplers(
    spec: RunSpec, num_samplers: int, batch_size: int, sizes: list[int]
) -> None:
    rollout = spec.rollout.model_copy(update={"num_samplers": num_samplers, "batch_size": batch_size})
    plan = RunPlan(spec.model_copy(update={"rollout": rollout}), ChatTokenizer(spec.initial_checkpoint))
    work_units = [plan.round_work_unit(0, index) for index in range(plan.work_units_per_round)]
    assert [len(work_unit.requests) // 4 for work_unit in work_units] == sizes == plan.work_unit_sizes(0)
    assert [group for work_unit in work_units for group in work_unit.group_ids[::4]] == list(range(5))


def test_replacement_groups_have_problems_of_their_own(spec: RunSpec) -> None:
    rollout = spec.rollout.model_copy(update={"max_oversampling": 2.0})
    plan = RunPlan(spec.model_copy(update={"rollout": rollout}), ChatTokenizer(spec.initial_checkpoint))
    # The first request is a round without replacements.
    assert (plan.work_units_per_round, plan.work_unit_sizes(0)) == (3, [2, 2, 1, 2, 2, 1])
    asked = [
        problem.problem_id
        for round_index in range(5)
        for index in range(6)
        for problem in plan.round_work_unit(round_index, index).problems[::4]
    ]
    assert sorted(asked) == sorted(problem.problem_id for problem in plan.train)


def test_an_epoch_asks_every_problem_once_in_a_new_order(plan: RunPlan) -> None:
    def asked(rounds: range) -> list[str]:
        work_units = [plan.round_work_unit(r, index) for r in rounds for index in range(plan.work_units_per_round)]
        return [problem.problem_id for work_unit in work_units for problem in work_unit.problems[::4]]

    first, second = asked(range(10)), asked(range(10, 20))
    assert sorted(first) == sorted(second) == sorted(problem.problem_id for problem in plan.train)
    assert first != second


def test_no_two_samples_of_a_run_share_a_seed(plan: RunPlan, other_seed: RunPlan) -> None:
    work_units = [
        p.round_work_unit(r, i) for p in (plan, other_seed) for r in range(25) for i in range(p.work_units_per_round)
    ]
    seeds = [request.seed for work_unit in work_units for request in work_unit.requests]
    assert len(set(seeds)) == len(seeds) == 2 * 25 * 20


def test_each_group_has_a_schedule_drawn_by_the_seed(spec: RunSpec) -> None:
    def drawn(seed: int) -> list[list[int]]:
        steps = [{"num_denoise_steps": count} for count in (1, 2, 8)]
        rollout = RolloutConfig.model_validate({**spec.rollout.model_dump(), "schedules": steps})
        changed = spec.model_copy(update={"rollout": rollout, "seed": seed})
        plan = RunPlan(changed, ChatTokenizer(spec.initial_checkpoint))
        work_units = [plan.round_work_unit(r, index) for r in range(10) for index in range(plan.work_units_per_round)]
        steps_of = [request.params.num_denoise_steps for work_unit in work_units for request in work_unit.requests]
        return [steps_of[start : start + 4] for start in range(0, len(steps_of), 4)]

    groups = drawn(0)
    assert all(len(set(group)) == 1 for group in groups), "a group is compared with itself"
    counts = [sum(group[0] == steps for group in groups) for steps in (1, 2, 8)]
    assert sum(counts) == 50
    assert min(counts) > 8
    assert drawn(0) == groups != drawn(1)


def test_evaluation_asks_every_held_out_problem_once_greedily(
    spec: RunSpec, plan: RunPlan, other_seed: RunPlan
) -> None:
    work_units = plan.evaluation_work_units(spec.rollout.sampling, load_config(spec.initial_checkpoint))
    problems = [problem.problem_id for work_unit in work_units for problem in work_unit.problems]
    assert problems == [problem.problem_id for problem in plan.heldout]
    assert len(set(problems)) == 20
    assert all(request.params.temperature == 0 for work_unit in work_units for request in work_unit.requests)
    assert problems == [problem.problem_id for problem in other_seed.heldout], "every run is asked the same"


def test_overlong_prompts_are_dropped_or_truncated_on_the_left(spec: RunSpec, plan: RunPlan) -> None:
    def limited(how: str, limit: int) -> RunPlan:
        rollout = spec.rollout.model_copy(update={"max_prompt_tokens": limit, "overlong_prompts": how})
        return RunPlan(spec.model_copy(update={"rollout": rollout}), ChatTokenizer(spec.initial_checkpoint))

    whole = plan.round_work_unit(0, 0).requests[0].prompt_ids
    cut = limited("truncate_left", 4)
    assert cut.round_work_unit(0, 0).requests[0].prompt_ids == whole[-4:]
    assert cut.num_overlong == 50 + 20
    with pytest.raises(ValueError, match=r"every prompt of task sums is longer than rollout\.max_prompt_tokens 4"):
        limited("drop", 4)
