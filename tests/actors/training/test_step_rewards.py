"""Step answers of a run: asked for by its plan, graded as its completions, and trained on by its learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.grader import GraderWorker
from actors.messages import ScoredWorkUnit, WorkUnit
from actors.plan import RunPlan
from actors.spec import RunSpec, sampler_facts
from actors.training.collate import collate
from actors.training.dynamic_sampling import EVERY_GROUP
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, TrajectoryConfig
from learner.learner import Learner
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer
from learner.parallel.sharding import ShardedPolicy
from rewards import Grade, Grader, RewardConfig, Sample, SumsConfig
from rewards.problem import Outcome
from rollout.request import Completion, StepAnswers
from rollout.sampler import Sampler


@pytest.fixture
def of_steps(spec: RunSpec) -> RunSpec:
    """The run with EGSPO-SA: two updates that take two of the four steps each."""
    settings = {"algorithm": "egspo-sa", "num_rounds": 2, "groups_per_round": 5, "group_size": 4, "inner_updates": 2}
    return spec.model_copy(update={"learner": LearnerConfig.model_validate(settings)})


@pytest.fixture
def work_unit(of_steps: RunSpec) -> WorkUnit:
    return RunPlan(of_steps, ChatTokenizer(of_steps.initial_checkpoint)).round_work_unit(0, 0)


@pytest.fixture
def completions(of_steps: RunSpec, work_unit: WorkUnit) -> list[Completion]:
    return Sampler(load_policy(of_steps.initial_checkpoint), 0).generate(work_unit.requests)


@pytest.fixture
def of_predictions(spec: RunSpec) -> RunSpec:
    """The run with MDPO: two of the four steps of each completion are trained."""
    settings = {"algorithm": "mdpo", "num_rounds": 2, "groups_per_round": 5, "group_size": 4}
    learner = LearnerConfig.model_validate(settings | {"estimator": {"num_states": 2}})
    return spec.model_copy(update={"learner": learner})


class _Counting:
    """A grader that rewards each text with its number of tokens, and records the texts."""

    def __init__(self, ungraded: frozenset[int] = frozenset()) -> None:
        self.samples: list[Sample] = []
        self._ungraded = ungraded

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        self.samples += samples
        outcomes = [Outcome.TIMEOUT if sample.num_tokens in self._ungraded else Outcome.GRADED for sample in samples]
        return [
            Grade(reward=float(sample.num_tokens), parts={}, correct=False, outcome=outcome)
            for sample, outcome in zip(samples, outcomes, strict=True)
        ]

    def take_costs(self) -> dict[str, float]:
        return {}


def _graded(spec: RunSpec, work_unit: WorkUnit, completions: Sequence[Completion], grader: _Counting) -> ScoredWorkUnit:
    worker = GraderWorker(spec.task, spec.reward, spec.initial_checkpoint)
    worker._grader = grader  # type: ignore[assignment]
    return worker.grade(work_unit, completions)[0]


def _answers(texts: Sequence[Sequence[int]]) -> StepAnswers:
    """Answers of the steps 2, 1, 0, ..., which end with token 1."""
    token_ids = np.full((len(texts), 8), 1, dtype=np.int32)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text)] = text
    return StepAnswers(
        steps=np.arange(len(texts), dtype=np.int32)[::-1],
        token_ids=token_ids,
        num_tokens=np.array([len(text) + 1 for text in texts], dtype=np.int32),
        ended=np.ones(len(texts), dtype=np.bool_),
    )


def test_only_methods_of_steps_ask_for_answers(spec: RunSpec, of_steps: RunSpec, work_unit: WorkUnit) -> None:
    plain = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint)).round_work_unit(0, 0)
    assert {request.num_step_answers for request in plain.requests} == {0}
    assert {request.num_step_answers for request in work_unit.requests} == {4}
    assert [replace(request, num_step_answers=0) for request in work_unit.requests[:4]] == list(plain.requests[:4])


def test_answers_are_graded_as_completions_and_equal_texts_once(
    of_steps: RunSpec, work_unit: WorkUnit, completions: list[Completion]
) -> None:
    texts = [(7, 8), (9,), (7, 8)]
    one = replace(
        completions[0],
        token_ids=np.array([9, 1, 1, 1, 1, 1, 1, 1], dtype=np.int32),
        num_tokens=2,
        step_map=np.arange(8, dtype=np.int32) // 2,
        step_answers=_answers(texts),
    )
    grader = _Counting()
    given = replace(work_unit, problems=work_unit.problems[:1], group_ids=(0,), requests=work_unit.requests[:1])
    scored = _graded(of_steps, given, [one], grader)
    tokenizer = ChatTokenizer(of_steps.initial_checkpoint)
    # The text of the completion is graded for it, and that of two steps for the first of them.
    assert [sample.text for sample in grader.samples] == [tokenizer.decode([9, 1]), tokenizer.decode([7, 8, 1])]
    assert all(sample.problem == work_unit.problems[0] for sample in grader.samples)
    assert (grader.samples[1].num_tokens, grader.samples[1].is_truncated) == (3, False)
    assert scored.step_rewards is not None
    np.testing.assert_array_equal(scored.step_rewards[0], [3.0, 2.0, 3.0, np.nan])
    assert scored.grades[0].reward == 2.0
    # What the learner does not need is not sent.
    assert [completion.step_answers for completion in scored.completions] == [None]


def test_terms_receive_the_blocks_of_an_answer_and_not_of_its_completion(
    of_steps: RunSpec, work_unit: WorkUnit, completions: list[Completion], tmp_path: Path
) -> None:
    (tmp_path / "by_block.py").write_text("def value(blocks, **rest):\n    return [1.0] * len(blocks)\n")
    term = {"kind": "function", "path": "by_block:value", "directory": str(tmp_path)}
    own = of_steps.model_copy(update={"reward": RewardConfig.model_validate({"terms": {"own": term}})})
    one = replace(
        completions[0],
        token_ids=np.array([9, 7, 8, 9, 7, 8, 9, 1], dtype=np.int32),
        num_tokens=8,
        step_map=np.arange(8, dtype=np.int32) // 2,
        step_answers=_answers([(7, 8)]),
    )
    params = work_unit.requests[0].params.model_copy(update={"block_length": 4})
    asked = replace(work_unit.requests[0], params=params)
    given = replace(work_unit, problems=work_unit.problems[:1], group_ids=(0,), requests=(asked,))
    grader = _Counting()
    _graded(own, given, [one], grader)
    tokenizer = ChatTokenizer(of_steps.initial_checkpoint)
    expected = [[([9, 7, 8, 9], 4), ([7, 8, 9, 1], 8)], [([7, 8, 1], 3)]]
    assert [[(block.text, block.end) for block in sample.blocks] for sample in grader.samples] == [
        [(tokenizer.decode(tokens), end) for tokens, end in blocks] for blocks in expected
    ]
    grader = _Counting()
    _graded(of_steps, given, [one], grader)
    assert all(sample.blocks == () for sample in grader.samples), "no term receives them"


def test_a_completion_without_answers_has_no_step_rewards(
    spec: RunSpec, plan: RunPlan, completions: list[Completion]
) -> None:
    plain = [replace(completion, step_answers=None) for completion in completions]
    scored = _graded(spec, plan.round_work_unit(0, 0), plain, _Counting())
    assert scored.step_rewards is None
    batch = collate([scored], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    assert batch is not None
    assert batch.step_rewards is None


def test_steps_after_a_completions_last_have_no_reward(
    of_steps: RunSpec, work_unit: WorkUnit, completions: list[Completion]
) -> None:
    plain = [replace(completion, step_answers=None) for completion in completions]
    rewards = tuple(np.full(1 + row % 4, row, dtype=np.float32) for row in range(len(plain)))
    scored = replace(_graded(of_steps, work_unit, plain, _Counting()), step_rewards=rewards)
    batch = collate([scored], num_slots=8, stop_ids=(1,), selection=EVERY_GROUP)
    assert batch is not None
    assert batch.step_rewards is not None
    assert batch.step_rewards.shape == (8, 4)
    assert batch.step_rewards.isnan().tolist() == [[step > row % 4 for step in range(4)] for row in range(8)]
    assert batch.step_rewards.nan_to_num().sum(dim=1).tolist() == [row * (1 + row % 4) for row in range(8)]


def _batch(spec: RunSpec, work_unit: WorkUnit, completions: list[Completion], grader: _Counting) -> RolloutBatch:
    batch = collate([_graded(spec, work_unit, completions, grader)], 8, (1,), EVERY_GROUP)
    assert batch is not None
    assert batch.step_rewards is not None
    return batch


def test_the_learner_trains_the_steps_whose_answers_were_graded(
    of_steps: RunSpec, work_unit: WorkUnit, completions: list[Completion]
) -> None:
    """In the order in which the sampler ranked them, two in each update."""
    batch = GroupedBatch.of(_batch(of_steps, work_unit, completions, _Counting()))
    estimator, facts = of_steps.learner.estimator, sampler_facts(of_steps.rollout.sampling)
    assert isinstance(estimator, TrajectoryConfig)
    assert batch.step_rewards is not None
    for row, rank_T in enumerate(estimator.step_ranks(batch, facts).tolist()):
        answers = completions[row].step_answers
        assert answers is not None
        assert [rank_T.index(rank) for rank in range(len(answers.steps))] == answers.steps.tolist()
        assert sorted(answers.steps) == (~batch.step_rewards[row].isnan()).nonzero()[:, 0].tolist()
        for index in (0, 1):
            corruption = estimator.corrupt(batch, InnerUpdate(index, 2), facts)
            trained = corruption.parts[corruption.rows == row].tolist()  # type: ignore[index]
            assert sorted(trained) == sorted(answers.steps[2 * index : 2 * index + 2].tolist())


def test_what_every_step_predicted_reaches_the_learner(of_predictions: RunSpec) -> None:
    """With its reward, and -1 for steps and slots without a record."""
    spec = of_predictions
    work_unit = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint)).round_work_unit(0, 0)
    assert {(one.num_step_answers, one.samples_step_answers) for one in work_unit.requests} == {(4, True)}
    policy, facts = load_policy(spec.initial_checkpoint), sampler_facts(spec.rollout.sampling)
    completions = Sampler(policy, 0).generate(work_unit.requests)
    grader = _Counting()
    batch = collate([_graded(spec, work_unit, completions, grader)], 10, (1,), EVERY_GROUP)
    assert batch is not None
    assert batch.step_rewards is not None
    assert batch.step_answers is not None
    assert batch.step_answers.shape == (8, batch.step_rewards.shape[1], 10)
    for row, completion in enumerate(completions):
        answers = completion.step_answers
        assert answers is not None
        assert sorted(answers.steps) == (~batch.step_rewards[row].isnan()).nonzero()[:, 0].tolist()
        assert sorted(answers.steps) == (batch.step_answers[row, :, 0] >= 0).nonzero()[:, 0].tolist()
        for step, tokens, num_tokens in zip(answers.steps, answers.token_ids, answers.num_tokens, strict=True):
            assert batch.step_answers[row, step].tolist() == [*tokens.tolist(), -1, -1]
            assert batch.step_rewards[row, step] == num_tokens
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    batch = replace(batch, step_rewards=batch.step_rewards * torch.arange(8)[:, None])
    metrics = Learner(ShardedPolicy(policy, None), spec.learner, facts).update(batch, 0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert any(not torch.equal(before[name], weight) for name, weight in policy.state_dict().items())


def test_a_step_whose_answer_is_not_graded_is_not_trained(
    of_steps: RunSpec, work_unit: WorkUnit, completions: list[Completion]
) -> None:
    answers = completions[0].step_answers
    assert answers is not None
    grader = _Counting()
    batch = GroupedBatch.of(_batch(of_steps, work_unit, completions, grader))
    assert batch.step_rewards is not None
    lost = int(answers.steps[0])
    rewards_BT = batch.step_rewards.clone()
    rewards_BT[0, lost] = torch.nan
    estimator, facts = of_steps.learner.estimator, sampler_facts(of_steps.rollout.sampling)
    assert isinstance(estimator, TrajectoryConfig)
    ranks = estimator.step_ranks(replace(batch, step_rewards=rewards_BT), facts)[0].tolist()
    assert ranks[lost] == -1
    assert [ranks.index(rank) for rank in range(len(answers.steps) - 1)] == answers.steps[1:].tolist()


def test_an_ungraded_answer_has_no_reward_unless_the_recipe_makes_it_zero(
    of_steps: RunSpec, work_unit: WorkUnit, completions: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(work_unit, problems=work_unit.problems[:1], group_ids=(0,), requests=work_unit.requests[:1])
    one = replace(completions[0], step_answers=_answers([(7, 8), (9,)]))
    scored = _graded(of_steps, given, [one], _Counting(frozenset({3})))
    assert scored.step_rewards is not None
    assert np.isnan(scored.step_rewards[0][1])
    assert scored.step_rewards[0][0] == 2.0

    monkeypatch.setattr(Grader, "evaluate", lambda _, samples: _Counting(frozenset({3})).grade(samples))
    zeroing = GraderWorker(of_steps.task, RewardConfig(ungraded="zero"), of_steps.initial_checkpoint)
    rewards = zeroing.grade(given, [one])[0].step_rewards
    assert rewards is not None
    assert rewards[0][:2].tolist() == [2.0, 0.0]


def test_grading_may_take_longer_with_step_answers(
    spec: RunSpec, of_steps: RunSpec, of_predictions: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumsConfig, "max_grading_s", 0.5)
    # Eight completions, and four answers of each, or one for each of four steps.
    extra = [one.grading_timeout_s - one.grading.timeout_s for one in (spec, of_steps, of_predictions)]
    assert extra == [4.0, 20.0, 20.0]
