import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from actors.coordination.round_stats import readable_samples, round_stats
from actors.grader import GraderWorker
from actors.messages import EVALUATION_ROUND, ScoredWorkUnit, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.spec import RunSpec
from actors.training.collate import collate
from actors.training.dynamic_sampling import EVERY_GROUP, GroupSelection
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rewards import Grade, Outcome, RewardConfig
from rollout.request import Completion, FinishReason


def _completion(text: list[int], version: int) -> Completion:
    zeros = np.zeros(len(text), dtype=np.float32)
    return Completion(
        token_ids=np.array(text, dtype=np.int32),
        num_tokens=len(text) - 1,
        step_map=np.arange(len(text), dtype=np.int32),
        commit_logp=zeros - 0.5,
        commit_logp_raw=zeros,
        commit_entropy=zeros,
        commit_law_entropy=zeros + 0.25,
        fallback=np.zeros(len(text), dtype=np.bool_),
        num_forwards=1,
        exact=True,
        logp_exact=True,
        finish_reason=FinishReason.EOS,
        policy_version=version,
    )


def _scored(work_unit: WorkUnit) -> ScoredWorkUnit:
    completions = tuple(_completion([7, 8, 9, 10], version=4) for _ in work_unit.requests)
    grades = tuple(
        Grade(reward=row / 10, parts={"digits": row / 10}, correct=False) for row in range(len(work_unit.requests))
    )
    summary = WorkUnitSummary.of(completions, grades, texts=[""] * len(completions), costs={})
    return ScoredWorkUnit(work_unit=work_unit, completions=completions, summary=summary)


def _regraded(scored: ScoredWorkUnit, grades: Sequence[Grade]) -> ScoredWorkUnit:
    return replace(scored, summary=replace(scored.summary, grades=tuple(grades)))


def _summary(grades: tuple[Grade, ...], costs: Mapping[str, float] = MappingProxyType({})) -> WorkUnitSummary:
    return WorkUnitSummary(
        grades=grades,
        texts=("",) * 8,
        num_tokens=(4,) * 8,
        step_maps=((),) * 8,
        num_forwards=(0,) * 8,
        policy_versions=(0,) * 8,
        failures=(),
        costs=costs,
    )


def test_rows_carry_their_own_request_completion_and_grade(plan: RunPlan) -> None:
    work_unit = plan.round_work_unit(0, 1)
    batch = collate([_scored(work_unit)], num_slots=8, stop_ids=(1, 9), selection=EVERY_GROUP)
    assert batch.group_ids.tolist() == [2] * 4 + [3] * 4
    # The end of text and the tokens after it in its block.
    assert batch.completion_ids.tolist() == [[7, 8, 9, 10, 1, 1, 1, 1]] * 8
    assert batch.is_stop[0].tolist() == [False, False, True, False, True, True, True, True]
    assert batch.completion_lengths.tolist() == [3] * 8
    assert batch.step_map[0].tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    assert batch.commit_logp[0].tolist() == [-0.5] * 4 + [0.0] * 4
    assert batch.commit_law_entropy[0].tolist() == [0.25] * 4 + [0.0] * 4
    torch.testing.assert_close(batch.rewards, torch.arange(8) / 10)
    for row, request in enumerate(work_unit.requests):
        assert batch.prompt_ids[row, : batch.prompt_lengths[row]].tolist() == list(request.prompt_ids)
    assert len(set(batch.sample_keys.tolist())) == 8
    assert set(batch.policy_versions.tolist()) == {4}


def test_an_ungraded_completion_is_left_out_of_its_group(plan: RunPlan) -> None:
    scored = _scored(plan.round_work_unit(0, 0))
    grades = list(scored.grades)
    grades[5] = replace(grades[5], outcome=Outcome.TIMEOUT, reward=9.0)
    batch = collate([_regraded(scored, grades)], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    assert batch.group_ids.tolist() == [0] * 4 + [1] * 3
    torch.testing.assert_close(batch.rewards, torch.tensor([0, 1, 2, 3, 4, 6, 7]) / 10)


def test_a_group_with_a_single_graded_completion_is_left_out(plan: RunPlan) -> None:
    scored = _scored(plan.round_work_unit(0, 0))
    grades = [replace(g, outcome=Outcome.ERROR) if row < 3 else g for row, g in enumerate(scored.grades)]
    batch = collate([_regraded(scored, grades)], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    assert batch.group_ids.tolist() == [1] * 4
    grades = [replace(grade, outcome=Outcome.ERROR) for grade in grades]
    assert collate([_regraded(scored, grades)], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP) is None


def test_ungraded_completions_are_counted_and_in_no_mean(plan: RunPlan) -> None:
    work_unit = plan.round_work_unit(0, 0)
    outcomes = [Outcome.GRADED] * 6 + [Outcome.TIMEOUT, Outcome.ERROR]
    grades = tuple(Grade(reward=1.0, parts={"x": 1.0}, correct=True, outcome=outcome) for outcome in outcomes)
    stats = round_stats([work_unit.group_ids], [_summary(grades)], GroupSelection(num_groups=2, max_groups=2))
    assert stats["num_completions"] == 6
    assert stats["num_ungraded"] == {"timeout": 1, "error": 1}
    assert stats["num_failed_groups"] == 0


def test_a_failed_grade_that_the_recipe_makes_a_zero_is_trained_on_and_still_counted(plan: RunPlan) -> None:
    scored = _scored(plan.round_work_unit(0, 0))
    failed = Grade(reward=0.0, parts={}, correct=False, outcome=Outcome.TIMEOUT, is_zeroed=True)
    grades = (failed, *scored.grades[1:])
    batch = collate([_regraded(scored, grades)], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    assert batch.rewards[:2].tolist() == pytest.approx([0.0, 0.1])
    assert batch.reward_parts[:2, 0].tolist() == pytest.approx([0.0, 0.1])
    stats = round_stats([scored.work_unit.group_ids], [_summary(grades)], GroupSelection(num_groups=2, max_groups=2))
    assert stats["num_completions"] == 8
    assert stats["reward_parts"] == {"digits": pytest.approx(0.35)}
    assert stats["num_ungraded"] == {"timeout": 1, "error": 0}


def test_answer_shapes_is_the_effective_number_of_shapes(plan: RunPlan) -> None:
    """Of eight answers seven are correct: four of one shape, two of another and one of a third."""
    answers = ["1*2+3", "12*3+4", "3*3+3", "1*1+10", "2-1", "30-11", "7", "1/2/3"]
    work_unit = plan.round_work_unit(0, 0)
    grades = [Grade(reward=1.0, parts={}, correct=answer != "1/2/3", answer=answer) for answer in answers]
    stats = round_stats([work_unit.group_ids], [_summary(tuple(grades))], GroupSelection(num_groups=2, max_groups=2))
    entropy = -(4 / 7 * math.log(4 / 7) + 2 / 7 * math.log(2 / 7) + 1 / 7 * math.log(1 / 7))
    assert stats["answer_shapes"] == pytest.approx(math.exp(entropy))
    wrong = tuple(replace(grade, correct=False) for grade in grades)
    assert (
        round_stats([work_unit.group_ids], [_summary(wrong)], GroupSelection(num_groups=2, max_groups=2))[
            "answer_shapes"
        ]
        == 0
    )


def test_costs_of_the_terms_add_up_over_a_round(plan: RunPlan) -> None:
    scored = _scored(plan.round_work_unit(0, 0))
    costs: list[dict[str, float]] = [{"polite/num_requests": 3}, {}, {"polite/num_requests": 2, "x/num_cached": 1}]
    summaries = [_summary(scored.grades, spent) for spent in costs]
    stats = round_stats([scored.work_unit.group_ids] * 3, summaries, GroupSelection(num_groups=2, max_groups=2))
    assert stats["reward_costs"] == {"polite/num_requests": 5, "x/num_cached": 1}


def test_graders_see_the_text_up_to_its_end_and_report_it(spec: RunSpec, plan: RunPlan) -> None:
    grader, work_unit = GraderWorker(spec.task, spec.reward, spec.initial_checkpoint), plan.round_work_unit(0, 0)
    tokenizer = ChatTokenizer(spec.initial_checkpoint)
    demonstration = [*tokenizer.encode_plain(plan.train[0].reference_completion), tokenizer.eos_id]
    # If graded, the tokens after the end of text would make the answer wrong.
    completion = replace(_completion([*demonstration, *demonstration], version=0), num_tokens=len(demonstration))
    work_unit = replace(work_unit, problems=(plan.train[0],) * 8)
    scored, summary = grader.grade(work_unit, [completion] * 8)
    assert all(grade.correct for grade in scored.grades)
    assert set(summary.texts) == {plan.train[0].reference_completion}
    stats = round_stats([work_unit.group_ids], [summary], GroupSelection(num_groups=5, max_groups=5))
    assert (stats["reward"], stats["correct"], stats["num_completions"]) == (1, 1, 8)
    assert stats["num_failed_groups"] == 3
    (sample, *_) = readable_samples({work_unit.key: summary}, 4, lambda _: work_unit, plan.prompt_text)
    assert sample["completion"] == plan.train[0].reference_completion
    assert sample["prompt"] == plan.train[0].messages[0].content


def test_terms_see_the_completion_that_was_sampled_and_only_in_the_rounds(spec: RunSpec, plan: RunPlan) -> None:
    terms = {"fast": {"kind": "speed"}, "overlong": {"kind": "length_penalty", "buffer_tokens": 4}}
    grader = GraderWorker(spec.task, RewardConfig.model_validate({"terms": terms}), spec.initial_checkpoint)
    work_unit = plan.round_work_unit(0, 0)
    completion = replace(_completion([7, 8, 9, 10, 1, 1, 1, 1], version=0), num_forwards=2)
    (grade, *_) = grader.grade(work_unit, [completion] * 8)[0].grades
    # Seven tokens in two forwards, on a canvas of eight.
    assert (grade.parts["fast"], grade.parts["overlong"]) == (3.5, -0.75)
    evaluated = replace(work_unit, key=WorkUnitKey(round=EVALUATION_ROUND, index=0))
    (grade, *_) = grader.grade(evaluated, [completion] * 8)[0].grades
    assert list(grade.parts) == ["digits"]


@pytest.mark.parametrize(("prompt", "ends"), [(4, [4, 7]), (5, [3, 7])])
def test_rewards_of_blocks_reach_the_slots_of_their_last_steps(
    prompt: int, ends: list[int], spec: RunSpec, plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 4 slots; those of a block-causal policy are counted from the prompt's first token."""
    is_causal = prompt == 5
    shape = load_config(spec.initial_checkpoint).model_copy(update={"block_length": 4 if is_causal else None})
    monkeypatch.setattr("actors.grader.load_config", lambda _: shape)
    source = "def {}(blocks, **rest):\n    return [len(block) + {} for block in blocks]\n"
    (tmp_path / "of_blocks.py").write_text(source.format("first", 0) + source.format("second", 100))
    terms = {
        name: {"kind": "function", "path": f"of_blocks:{name}", "directory": str(tmp_path), "weight": weight}
        for name, weight in (("first", 2.0), ("second", 0.5))
    }
    grader = GraderWorker(spec.task, RewardConfig.model_validate({"terms": terms}), spec.initial_checkpoint)
    work_unit = plan.round_work_unit(0, 0)
    params = work_unit.requests[0].params.model_copy(update={"block_length": 4})
    requests = tuple(replace(one, prompt_ids=(2,) * prompt, params=params) for one in work_unit.requests)
    tokens = [7, 8, 9, 10, 7, 8, 1, 1]
    steps = np.array([0, 1, 1, 1, 3, 2, 3, 3], dtype=np.int32)
    completion = replace(_completion(tokens, version=0), step_map=steps)
    scored, _ = grader.grade(replace(work_unit, requests=requests), [completion] * 8)
    lengths = [len(grader._tokenizer.decode(some)) for some in (tokens[: ends[0]], tokens[ends[0] : ends[1]])]
    rewards = first, second = [2.0 * length + 0.5 * (length + 100) for length in lengths]
    grade = scored.grades[0]
    assert grade.block_rewards is not None
    assert [end for end, _ in grade.block_rewards] == ends
    assert [reward for _, reward in grade.block_rewards] == pytest.approx(rewards)
    assert grade.reward == pytest.approx(sum(rewards) + grade.parts["digits"])
    batch = collate([scored], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    assert batch is not None
    assert batch.process_rewards is not None
    assert batch.outcome_rewards is not None
    # Slot 3 was committed in step 1, before the second block of the block-causal policy was at its last step, 3.
    of_slot_3 = 0 if is_causal else first
    expected = [0, first, first, of_slot_3, second, 0, second, 0]
    assert batch.process_rewards[0].tolist() == pytest.approx(expected)
    assert batch.outcome_rewards.tolist() == pytest.approx([grade.parts["digits"]] * batch.num_rows)


def test_rows_are_in_the_order_of_their_groups_whatever_the_work_units(plan: RunPlan) -> None:
    work_units = [_scored(plan.round_work_unit(0, index)) for index in range(plan.work_units_per_round)]
    in_order = collate(work_units, num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    turned = collate(work_units[::-1], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    assert in_order is not None
    assert turned is not None
    torch.testing.assert_close(turned.given(), in_order.given())
    assert turned.group_ids.tolist() == sorted(turned.group_ids.tolist())
