"""Learning test of every algorithm: the mean reward rises on a toy task, sampled as in a run."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.messages import ScoredWorkUnit, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.spec import sampler_facts
from actors.training.collate import collate
from actors.training.dynamic_sampling import EVERY_GROUP
from learner.algorithms import ALGORITHMS
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.seeds import fold
from learner.tree.config import inner_nodes
from rewards import Grade, Message, Problem
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler

GEN_LENGTH, GROUPS, GROUP_SIZE = 4, 4, 8
TARGET = 5
PROMPTS = [(7, 8), (8, 9, 7), (9, 9), (7, 7, 8)]
CONFIG = TransformerConfig(
    vocab_size=12,
    d_model=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    mlp_hidden_size=48,
    max_sequence_length=16,
    mask_token_id=10,
    eos_token_id=11,
    pad_token_id=11,
)


def _reward(tokens: list[int]) -> float:
    """Return the share of slots that hold the target; the only best completion has 1."""
    return sum(token == TARGET for token in tokens) / GEN_LENGTH


def _round(model: Transformer, params: SamplingParams, index: int, config: LearnerConfig) -> RolloutBatch:
    num_step_answers = config.num_step_answers(GEN_LENGTH)
    requests = [
        Request(
            prompt_ids=PROMPTS[group],
            params=params,
            seed=1000 * index + GROUP_SIZE * group + sample,
            num_step_answers=num_step_answers,
            samples_step_answers=config.samples_step_answers,
            node_seeds=tuple(
                fold(index, group, level, node) for level, node in enumerate(inner_nodes(config.branches, sample))
            ),
        )
        for group in range(GROUPS)
        for sample in range(GROUP_SIZE)
    ]
    completions = Sampler(model, index).generate(requests)
    rewards = [_reward(completion.token_ids.tolist()) for completion in completions]
    problem = Problem(
        problem_id="p", messages=(Message(role="user", content="?"),), answer=str(TARGET), reference_completion=""
    )
    work_unit = WorkUnit(
        key=WorkUnitKey(round=index, index=0),
        problems=(problem,) * len(requests),
        group_ids=tuple(row // GROUP_SIZE for row in range(len(requests))),
        requests=tuple(requests),
    )
    # Half of the maximum reward counts as correct: methods that use only correctness must find some at the start.
    grades = tuple(Grade(reward=reward, parts={"share": reward}, correct=reward >= 0.5) for reward in rewards)
    summary = WorkUnitSummary.of(completions, grades, texts=[""] * len(completions), costs={})
    scored = ScoredWorkUnit(
        work_unit=work_unit,
        completions=tuple(completions),
        summary=summary,
        step_rewards=tuple(map(_step_rewards, completions)) if num_step_answers else None,
    )
    return collate([scored], GEN_LENGTH, (11,), EVERY_GROUP)


def _step_rewards(completion: Completion) -> NDArray[np.float32]:
    rewards = np.full(GEN_LENGTH, np.nan, dtype=np.float32)
    assert completion.step_answers is not None
    rewards[completion.step_answers.steps] = [_reward(tokens) for tokens in completion.step_answers.token_ids.tolist()]
    return rewards


def _sampling(name: str) -> SamplingParams:
    settings: dict[str, object] = {"gen_length": GEN_LENGTH, "block_length": 2, "num_denoise_steps": 4}
    if name == "justgrpo":
        settings["block_length"] = 1
    if name == "forkgrpo":
        # A random policy is never confident, so each step uses the fallback.
        settings |= {"threshold": 0.9}
    # End of text is forbidden: early ends are not part of this task.
    return SamplingParams.model_validate(settings | {"temperature": 1.0, "forbidden_ids": (11,)})


# Every method without a teacher: a random policy has nothing to teach.
NAMES = [name for name in ALGORITHMS if ALGORITHMS[name]["objective"]["name"] != "distillation"]
# The first method with each estimator and objective; variants of it run nightly.
FIRST = {(ALGORITHMS[name]["estimator"]["name"], ALGORITHMS[name]["objective"]["name"]): name for name in NAMES[::-1]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST.values() else pytest.mark.nightly) for name in NAMES]
)
def test_the_expected_reward_rises(name: str) -> None:
    model = Transformer(CONFIG)
    init_weights(model, seed=0)
    params = _sampling(name)
    filters = {"min_accuracy": 0.0, "max_accuracy": 1.0, "min_speed_range": 0.0}
    config = LearnerConfig.model_validate(
        {
            **({"estimator": {"branches": (2, 4)}} if name == "d-treerpo" else {}),
            "algorithm": name,
            "num_rounds": 12,
            "inner_updates": 2,
            "groups_per_round": GROUPS,
            "group_size": GROUP_SIZE,
            "lr": 3e-3,
            "max_grad_norm": 1.0,
            "weight_decay": 0.0,
            "filters": filters,
        }
    )
    learner = Learner(ShardedPolicy(model, None), config, sampler_facts(params))
    rewards = []
    for index in range(12):
        batch = _round(model, params, index, config)
        rewards.append(float(batch.rewards.mean()))
        learner.update(batch, index)
    rewards.append(float(_round(model, params, 99, config).rewards.mean()))
    assert rewards[-1] > rewards[0] + 0.25, rewards
