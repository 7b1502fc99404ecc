from __future__ import annotations

import pytest
import torch

from actors.plan import RunPlan
from actors.run_config import GraderSection
from actors.spec import Phase, RunSpec
from learner.learner import LearnerConfig
from learner.model.checkpoint import save_checkpoint
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, init_weights
from learner.sft.config import SftConfig
from rewards import RewardConfig, SumsConfig
from rollout.config import EvaluationConfig, RolloutConfig
from rollout.request import SamplingParams
from tests.tiny_policy import config_of


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A run of digit sums whose initial checkpoint is a random policy of two layers."""
    run_dir = tmp_path_factory.mktemp("run")
    spec = RunSpec(
        name="test",
        run_dir=run_dir,
        task=SumsConfig(),
        reward=RewardConfig(),
        num_train_problems=50,
        phases=(Phase.SFT, Phase.RL),
        sft=SftConfig(num_labels=10, num_steps=2, batch_size=8),
        rollout=RolloutConfig(
            batch_size=8,
            max_prompt_tokens=12,
            sampling=SamplingParams(gen_length=8, block_length=8, num_denoise_steps=4, temperature=1.0),
        ),
        learner=LearnerConfig(num_rounds=2, groups_per_round=5, group_size=4, inner_updates=1),
        evaluation=EvaluationConfig(num_problems=20),
        grading=GraderSection(timeout_s=30),
        checkpoint_every_s=0.0,
    )
    tokenizer_dir = run_dir / "tokenizer"
    make_tokenizer(["1 2 3"], tokenizer_dir, 300)
    tokenizer = ChatTokenizer(tokenizer_dir)
    config = config_of(tokenizer, max_sequence_length=32, num_layers=2)
    torch.set_num_threads(1)
    model = Transformer(config)
    init_weights(model, seed=0)
    state = {"phase": "untrained", "round": 0, "policy_version": 0, "rl_seconds": 0.0}
    save_checkpoint(spec.initial_checkpoint, config, model.state_dict(), tokenizer_dir, trainer_state=state)
    return spec


@pytest.fixture
def plan(spec: RunSpec) -> RunPlan:
    return RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))


@pytest.fixture
def other_seed(spec: RunSpec) -> RunPlan:
    return RunPlan(spec.model_copy(update={"seed": 1}), ChatTokenizer(spec.initial_checkpoint))
