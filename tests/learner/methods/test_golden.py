"""Losses, gradients and advantages of the algorithms against golden numbers of the papers' code.

The numbers in `golden.json` were computed by the functions that `SOURCES` names, run unchanged on the example and the
policies below, with our masks instead of their random ones. Nothing here restates a formula, so that these tests detect
any change of an algorithm's configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from learner.advantages import Rewards, group_advantages, prediction_advantages, step_advantages
from learner.algorithms import ALGORITHMS
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts, TrajectoryConfig
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.scoring import Targets, score_targets
from learner.optimizer import StepResult
from learner.parallel.sharding import ShardedPolicy
from learner.round import WEIGHING
from learner.tree.nodes import node_advantages
from tests.learner.batches import batch_of

VOCAB, EOS, MASK = 8, 6, 7
PROMPT, SLOTS, BLOCK = 4, 16, 4
GROUP, NUM_GROUPS = 4, 2
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Origin of an algorithm's golden numbers, and the example that they are for."""

    repository: str
    """Repository on GitHub."""
    commit: str
    """Commit of the repository."""
    functions: str
    """File and functions that were run."""
    lengths: tuple[int, ...] = (16, 5, 9, 2, 7, 16, 3, 12)
    """Number of tokens of each completion."""
    slots_per_step: int = 1
    """Slots committed in each denoise step."""
    block_length: int = BLOCK
    """The sampler's block length."""
    distances: tuple[float, ...] = (1.0, -1.0)
    """Signed distances of the policies of later inner updates from the first one."""
    is_block_causal: bool = False
    """Whether the policies are block-causal: blocks are then counted from the first column."""
    temperature: float = 1.0
    """The sampler's temperature."""
    changes: Mapping[str, object] | None = None
    """Overrides of the objective, which switch off parts that only one implementation has."""
    learner: Mapping[str, object] = field(default_factory=dict)
    """Overrides of the learner."""
    round_index: int = 0
    """The round, of two."""
    branches: tuple[int, int] | None = None
    """For a rollout tree of two levels: the children of a node at each. All completions are then of one problem. A
    canvas is one block, whose slots are committed in a mixed order, and text goes on after its first end."""
    has_step_rewards: bool = False
    """Whether the completions of the states before the steps have rewards."""
    has_step_answers: bool = False
    """Whether what the steps predicted is recorded."""
    tolerance: float = 1e-5
    """Greatest relative difference."""
    loss_divisor: float = 1.0
    """A constant that their loss is divided by and ours is not."""
    std: tuple[int, float] | None = None
    """For advantages divided by a standard deviation: what their code subtracts from the number of completions before
    it divides by it, and what it adds to the deviation."""

    @property
    def updates(self) -> int:
        """Number of inner updates."""
        return 1 + len(self.distances)


FULL = (SLOTS,) * 8
DARE = {"repository": "yjyddq/DARE", "commit": "83ae8a305a53a914cce563aedceeac88566891cb"}
BLOCK_R1 = {"repository": "YanJiangJerry/Block-R1", "commit": "fd7a1b88b0b4b1dcb74e98e94234f9b51a39dd4d"}
SPG = {
    "repository": "facebookresearch/SPG",
    "commit": "a1c712091aee3fde759bbf73b7850546265cd52d",
    "functions": "spg/spg_trainer.py: _generate_and_score_completions, _get_per_seq_logps, compute_loss",
}
EGSPO = {
    "repository": "vishnutez/egspo-dllm-rl",
    "commit": "a7d618b5fe25f3af78913e1160d7fd5e290cf000",
    "functions": "egspo/egspo_trainer.py: _generate_and_score_completions, _get_per_token_logps_unbiased, compute_loss",
}
D1 = {
    "repository": "dllm-reasoning/d1",
    "commit": "837888f22c21a5da91a0af2b0d7b19e81d9b47ec",
    "functions": "diffu-grpo/diffu_grpo_trainer.py: _generate_and_score_completions, _prepare_inputs, "
    "_get_per_token_logps, compute_loss",
}
SOURCES: Mapping[str, Source] = {
    "diffu-grpo": Source(**D1),
    # Each group is a micro-batch, with the masks of its micro-step.
    "diffu-grpo-parity": Source(**D1),
    # One group at a time: the softmax is over a worker's rows.
    "wd1": Source(
        repository="xiaohangt/wd1",
        commit="08989851e5dd84ac31af04d28f20a93488d66ffb",
        functions="wd1/trainers/rev_grpo_trainer.py: _generate_and_score_completions, _get_per_token_logps, "
        "compute_loss",
    ),
    "coupled-grpo": Source(
        repository="apple/ml-diffucoder",
        commit="f735e01376b752b70356efe45192f31499bf30dc",
        functions="src/open_r1/coupled_grpo.py: _generate_and_score_completions, _get_per_token_logps, "
        "selective_log_softmax, compute_loss",
    ),
    # Without the KL term: theirs is to the old policy and a sum over tokens, the paper's to the reference.
    "unigrpo": Source(
        repository="Gen-Verse/dLLM-RL",
        commit="10b4fd1cba83e4496c20585dc2fd01dc02f20255",
        functions="train/rl_mmada.py: forward_process; reward/rl_reward.py: z_score_normalize",
        changes={"kl_coef": 0.0},
        std=(0, 0.0),
    ),
    "spg": Source(**SPG),
    "spg-eubo": Source(**SPG),
    "espo": Source(
        repository="ML-GSAI/ESPO",
        commit="b5f2dac4c54073a2f36c00bb28bc754a99730159",
        functions="espo/espo_trainer.py: _generate_and_score_completions, _get_elbo_mc, compute_loss",
    ),
    "gdpo": Source(
        **BLOCK_R1,
        functions="rl/trainers/gdpo_trainer.py: compute_loss; rl/trainers/likelihood_estimators.py: "
        "NumericalIntegrationEstimator; rl/trainers/train_utils.py: grpo_group_normalized_advantages",
        std=(1, 1e-4),
    ),
    # One group at a time, as for wd1. Some weights exceed 5.
    "stabledrl": Source(
        **BLOCK_R1, functions="rl/trainers/stable_drl_svpo.py: compute_loss_spg", distances=(9.0, -2.0)
    ),
    "stepmerge": Source(
        repository="kuleshov-group/d2",
        commit="381b9f14f4afd0719297ac852e4015c74e0ed235",
        functions="diffu-grpo/diffu_grpo_trainer.py: d2StepMergeTrainer._generate_and_score_completions, "
        "_get_per_token_logps, compute_loss",
    ),
    # Nearby later policies: 1 + d and e^d stay within their clip, which ours lacks.
    "bgpo": Source(
        **DARE,
        distances=(0.1, -0.1),
        functions="verl/workers/actor/llada_dp_actor_bgpo.py: update_policy; verl/trainer/ppo/dllm_core_algos.py: "
        "compute_policy_loss_bgpo; verl/trainer/ppo/core_algos.py: compute_grpo_outcome_advantage",
        std=(1, 1e-6),
    ),
    # Even nearer later policies: ratios are of whole bounds.
    "ebpo": Source(
        **DARE,
        distances=(0.4, -0.4),
        functions="verl/trainer/ppo/dllm_core_algos.py: compute_ebpo_composite_elbo, compute_policy_loss_ebpo, with "
        "the p_mask of _forward_process_ebpo; verl/trainer/ppo/core_algos.py: compute_grpo_outcome_advantage",
        is_block_causal=True,
        std=(1, 1e-6),
    ),
    # Every step commits text, since theirs divides by all steps. Ratios stay below the dual clip.
    "cj-grpo": Source(
        **DARE,
        functions="verl/workers/actor/llada_dp_actor_cj_grpo.py: update_policy; verl/trainer/ppo/dllm_core_algos.py: "
        "compute_policy_loss; verl/trainer/ppo/core_algos.py: compute_grpo_outcome_advantage",
        lengths=(16, 15, 16, 15, 15, 16, 16, 15),
        distances=(0.7, -0.7),
        slots_per_step=2,
        std=(1, 1e-6),
    ),
    "dmpo": Source(
        repository="yuchen-zhu-zyc/DMPO",
        commit="96af1a47b4a8177e2b1d0e94d669786af4a7ba23",
        functions="DMPO/dmpo_trainer.py: _generate_and_score_completions, compute_log_prob_elbo, compute_loss",
    ),
    # Without stepwise advantages (lambda1 0). Theirs is divided by the tokens of a step, and also scores the fill.
    "egspo": Source(**EGSPO, lengths=FULL, slots_per_step=2, loss_divisor=2.0),
    # As the launcher sets it: lambda1 0.5, normalize_returns.
    "egspo-sa": Source(**EGSPO, lengths=FULL, slots_per_step=2, has_step_rewards=True, loss_divisor=2.0),
    # With the ratio and clip that their code has above one update a round, and our advantages. A completion has three
    # states.
    "rldf": Source(
        repository="ant-research/Drift",
        commit="7abd99b79f20175aff3f5082501eb5b43333bad9",
        functions="trainer/main_rl.py: DriftTrainer.compute_loss, compute_per_token_logps",
        lengths=FULL,
        slots_per_step=6,
        std=(1, 1e-8),
    ),
    # Each problem has a correct completion, since theirs counts problems without one too. The first ones have an even
    # number of states, since theirs drops those that it cannot divide by the updates.
    "d-opsd": Source(
        repository="xingzhejun/d-OPSD",
        commit="1b55cf3f8ca47b856c7c2b203c2091bfe4b5e087",
        functions="d-opsd/d_opsd_trainer.py: _generate_and_score_completions, compute_loss, generalized_jsd_loss",
        lengths=(16, 5, 9, 2, 10, 16, 3, 12),
        slots_per_step=2,
        distances=(1.0,),
        changes={"top_k": 5},
    ),
    # It is on-policy. Theirs adds 1e-4 to numbers of masks. The loss is the mean over states, as in an optimizer step
    # of its launcher. The policies never predict a mask.
    "mdpo": Source(
        repository="autonomousvision/mdpo",
        commit="e6ae43906d202a11813860746c9f361d2da3ab5d",
        functions="src/open_r1/mdpo/mdpo_trainer.py: _generate_and_score_completions, split_into_micro_batches, "
        "_get_per_token_logps, compute_loss",
        temperature=0.4,
        distances=(),
        has_step_rewards=True,
        has_step_answers=True,
        tolerance=1e-4,
    ),
    # In one batch, since theirs trains one parent at a time. Every level commits text, since theirs counts empty ones.
    "d-treerpo": Source(
        repository="THU-BPM/d-TreeRPO",
        commit="3eb6f215184bd078e948651539ce046133a68174",
        functions="dtreerpo/dtreerpo_trainer.py: _perform_tree_search_and_compute_advantages, "
        "_get_local_transition_logps, _build_completion_mask, _pack_segments_by_parent, _concat_segments, compute_loss",
        lengths=(14, 9, 16, 12, 7, 16, 11, 10),
        block_length=SLOTS,
        learner={"group_size": GROUP * NUM_GROUPS, "estimator": {"branches": (2, 4)}},
        round_index=1,
        branches=(2, 4),
    ),
    # The completions fill the canvas, since theirs scores tokens after the text too. It is on-policy.
    "justgrpo": Source(
        repository="LeapLabTHU/JustGRPO",
        commit="eebe50e71f5b84ec6b3824cb502664577989db1b",
        functions="grpo.py: logprob_loss, compute_group_advantages",
        lengths=FULL,
        block_length=1,
        distances=(),
        std=(1, 1e-4),
    ),
}


class Table(nn.Module):
    """A policy of 64 numbers. Every token on the canvas adds its row of a table to the logits of every slot, halved for
    each position in between."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.config = TransformerConfig(
            vocab_size=VOCAB,
            d_model=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            mlp_hidden_size=8,
            max_sequence_length=64,
            mask_token_id=MASK,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
        self.weight = nn.Parameter(table(number))

    def logits(self, ids_BS: Tensor) -> Tensor:
        """Return logits [B, S, V] in float64."""
        place_S = torch.arange(ids_BS.shape[1])
        nearness_SS = 0.5 ** (place_S[:, None] - place_S).abs().double()
        return nearness_SS @ self.weight[ids_BS]

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor,
        queries: Tensor,
        scored: Tensor,
        *,
        targets: Targets | None = None,
        before_head: bool = False,
    ) -> Tensor:
        """Score tokens as `Transformer` does: [N] float32, or return the head's input. The head is the identity."""
        rows_B1 = torch.arange(len(ids))[:, None]
        logits_MV = self.logits(ids)[rows_B1, queries].flatten(0, 1)[scored]
        if targets is None:
            assert before_head
            return logits_MV
        if targets.teacher is not None:
            return score_targets(logits_MV, torch.eye(VOCAB, dtype=torch.float64), targets)
        logits_MV = logits_MV / targets.temperature
        if targets.excludes_mask_id:
            logits_MV = logits_MV.index_fill(1, torch.tensor([MASK]), -torch.inf)
        return logits_MV.log_softmax(-1)[targets.slot, targets.token].float()


def table(number: int, distance: float = 1.0) -> Tensor:
    """Return the table [V, V] float64 of a policy: 0 sampled, 1 is a later one, 2 is the reference."""
    place = torch.arange(1, VOCAB * VOCAB + 1, dtype=torch.float64).view(VOCAB, VOCAB)
    moved = 0.0 if number == 0 else 0.5 * distance * (place * (2.8 + number)).cos()
    return (place * 1.7).sin() + moved


class TablePolicy(ShardedPolicy):
    """A table policy on one process; its reference is table 2."""

    def __init__(self, number: int) -> None:
        super().__init__(Table(number), None)  # type: ignore[arg-type]

    def frozen_copy(self) -> TablePolicy:
        return TablePolicy(2)

    def gathered_head(self) -> Tensor:
        return torch.eye(VOCAB, dtype=torch.float64)


class Recorder:
    """A fake optimizer: records the gradient of every step, and installs the next policy."""

    def __init__(self, policy: Table, distances: tuple[float, ...]) -> None:
        self._policy, self._distances = policy, iter((*distances, 0.0))
        self.gradients: list[Tensor] = []

    def rollback(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, lr: float, max_grad_norm: float, loss: Tensor) -> StepResult:
        assert self._policy.weight.grad is not None
        self.gradients.append(self._policy.weight.grad.clone())
        with torch.no_grad():
            self._policy.weight.copy_(table(1, next(self._distances)))
        self._policy.weight.grad = None
        return StepResult(loss=0.0, grad_norm=0.0)


def example(source: Source) -> RolloutBatch:
    """Two groups of four completions whose slots were all denoised, block by block."""
    num_rows = GROUP * NUM_GROUPS
    lengths = torch.tensor(source.lengths)
    ids = torch.arange(num_rows * SLOTS).view(num_rows, SLOTS) * 11 % 13 * 5 % EOS
    slots = torch.arange(SLOTS)
    ids = torch.where(slots < lengths[:, None] - (lengths < SLOTS)[:, None].long(), ids, EOS)
    # Within a block of 4 the commit order is 2, 0, 3, 1.
    orders = {BLOCK: torch.tensor([1, 3, 0, 2]), 1: torch.zeros(1, dtype=torch.int64), SLOTS: slots * 7 % SLOTS}
    order = orders[source.block_length]
    steps = slots // source.block_length * source.block_length + order[slots % source.block_length]
    step_BL = (steps // source.slots_per_step).expand(num_rows, SLOTS)
    prompts = (torch.arange(NUM_GROUPS * PROMPT).view(NUM_GROUPS, PROMPT) * 5 % 6).repeat_interleave(GROUP, 0)
    rewards = torch.tensor([1.0, 0.25, 0.5, 0.125, 0.75, 2.0, 0.5, 0.0])
    of_steps, num_steps = {}, int(step_BL.max()) + 1
    group_ids = torch.arange(NUM_GROUPS).repeat_interleave(GROUP)
    if source.branches is not None:
        ids, lengths, of_steps["node_keys"] = tree(source.branches, lengths, step_BL)
        prompts, group_ids = prompts[:1].expand(num_rows, -1), torch.zeros_like(group_ids)
    if source.has_step_rewards:
        of_steps["step_rewards"] = torch.arange(num_rows * num_steps).view(num_rows, num_steps) * 7 % 11 / 8
    if source.has_step_answers:
        some = torch.arange(num_rows * num_steps * SLOTS).view(num_rows, num_steps, SLOTS) * 17 % 23 % MASK
        is_committed = step_BL[:, None] <= torch.arange(num_steps)[:, None]
        of_steps["step_answers"] = torch.where(is_committed, ids[:, None], some).int()
    return batch_of(
        prompts=prompts,
        completions=ids,
        lengths=lengths,
        steps=step_BL,
        commit_entropy=entropies(prompts, ids, step_BL),
        rewards=rewards,
        is_stop=ids == EOS,
        group_ids=group_ids,
        **of_steps,
    )


def tree(branches: tuple[int, int], lengths: Tensor, step_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return completions [B, L] of trees of two levels, the number of tokens of each text, and node keys [B, 2].

    Each text first ends after `lengths` tokens, or where the first half of the steps ended its first sibling's.
    """
    place_B = torch.arange(len(lengths))
    slots, node_B = torch.arange(SLOTS), place_B // branches[1]
    ids = (place_B[:, None] * 7 + slots * 5 + slots * place_B[:, None]) % 13 % EOS
    ids = torch.where((slots == lengths[:, None] - 1) & (lengths < SLOTS)[:, None], EOS, ids)
    ids = torch.where(step_BL < SLOTS // 2, ids[node_B * branches[1]], ids)
    is_end = ids == EOS
    lengths = torch.where(is_end.any(dim=1), is_end.long().argmax(dim=1) + 1, SLOTS)
    return ids, lengths, torch.stack((100 + node_B, place_B), dim=1)


def entropies(prompt_BP: Tensor, completion_BL: Tensor, step_BL: Tensor) -> Tensor:
    """Return the entropy of the sampling policy's softmax at each slot when it was committed, [B, L] float32."""
    found_BL = torch.zeros(completion_BL.shape)
    for step in range(int(step_BL.max()) + 1):
        canvas_BS = torch.cat((prompt_BP, completion_BL.masked_fill(step_BL >= step, MASK)), dim=1)
        logp_BLV = Table(0).logits(canvas_BS)[:, PROMPT:].log_softmax(-1).detach()
        found_BL = torch.where(step_BL == step, -(logp_BLV.exp() * logp_BLV).sum(dim=-1).float(), found_BL)
    return found_BL


def config(name: str) -> LearnerConfig:
    """Return the algorithm's config from the table, with as many inner updates as the golden numbers have."""
    source = SOURCES[name]
    settings = {"algorithm": name, "num_rounds": 2, "inner_updates": source.updates} | source.learner
    return LearnerConfig.model_validate(settings | ({"objective": source.changes} if source.changes else {}))


def sampler(name: str) -> SamplerFacts:
    source = SOURCES[name]
    return SamplerFacts(
        temperature=source.temperature,
        block_length=source.block_length,
        max_denoise_steps=SLOTS // source.slots_per_step,
        has_reproducible_logps=False,
        is_block_causal=source.is_block_causal,
    )


def grouped_example(name: str) -> GroupedBatch:
    """Return the example with the facts of its groups, and the advantages of its steps if predictions are trained."""
    batch, facts = example(SOURCES[name]), sampler(name)
    grouped = GroupedBatch.of(batch)
    if not SOURCES[name].has_step_answers:
        return grouped
    assert batch.step_rewards is not None
    advantages_BT = prediction_advantages(Rewards.of(batch), batch.step_rewards, facts.max_denoise_steps)
    return replace(grouped, step_advantages=advantages_BT)


def masks(name: str) -> list[list[int]]:
    """Return the masked columns, as bits, of each canvas of every inner update, and of the weighing before the
    first."""
    grouped, estimator = grouped_example(name), config(name).estimator
    plans = [WEIGHING] if config(name).objective.precomputes_row_weights else []
    found = []
    for index in [*plans, *range(SOURCES[name].updates)]:
        corruption = estimator.corrupt(grouped, InnerUpdate(index, SOURCES[name].updates), sampler(name))
        prompt = torch.zeros(len(corruption.rows), PROMPT, dtype=torch.bool)
        if corruption.prompt_masked is not None:
            prompt = corruption.prompt_masked
        bits = 2 ** torch.arange(PROMPT + SLOTS)
        found.append((torch.cat((prompt, corruption.masked), dim=1) * bits).sum(dim=1).tolist())
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_loss_and_gradient_equal_the_public_code(name: str) -> None:
    """At the first inner update, and at two others whose ratios lie on both sides of the clip."""
    golden = GOLDEN[name]
    assert masks(name) == golden["masks"], "other masks are drawn: these numbers say nothing of them"
    policy = TablePolicy(0)
    learner = Learner(policy, config(name), sampler(name))
    recorder = Recorder(policy.module, SOURCES[name].distances)  # type: ignore[arg-type]
    learner.optimizer = recorder  # type: ignore[assignment]
    metrics = learner.update(example(SOURCES[name]), SOURCES[name].round_index)
    divisor = SOURCES[name].loss_divisor
    losses = [divisor * loss for loss in golden["losses"]]
    rel = SOURCES[name].tolerance
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=rel, abs=1e-6)
    assert len(recorder.gradients) == len(golden["gradients"])
    for gradient, expected in zip(recorder.gradients, map(torch.tensor, golden["gradients"]), strict=True):
        difference = (gradient.flatten() - divisor * expected).abs().max()
        assert difference < rel * divisor * expected.abs().max()


@pytest.mark.parametrize("name", [name for name in SOURCES if "advantages" in GOLDEN[name]])
def test_advantages_equal_the_public_code(name: str) -> None:
    """Up to the definition of a group's standard deviation: ours is the population's, plus 1e-4."""
    batch, std = example(SOURCES[name]), SOURCES[name].std
    ours = group_advantages(Rewards.of(batch), config(name).advantage)
    factors = torch.ones(len(ours))
    if std is not None:
        deviations = batch.rewards.view(NUM_GROUPS, GROUP).std(dim=1, correction=0).repeat_interleave(GROUP)
        theirs = deviations * math.sqrt(GROUP / (GROUP - std[0])) + std[1]
        factors = (deviations + 1e-4) / theirs
    assert torch.allclose(ours * factors, torch.tensor(GOLDEN[name]["advantages"]), rtol=1e-5, atol=1e-6)


def test_step_advantages_equal_the_public_code() -> None:
    """Of the steps of each completion, the one of highest entropy first."""
    batch, of_row = GroupedBatch.of(example(SOURCES["egspo-sa"])), config("egspo-sa")
    assert isinstance(of_row.estimator, TrajectoryConfig)
    assert batch.step_rewards is not None
    rank_BT = of_row.estimator.step_ranks(batch, sampler("egspo-sa"))
    ours_BT = step_advantages(Rewards.of(batch), batch.step_rewards, rank_BT, of_row.step_gain_coef)
    in_order_BT = ours_BT.gather(1, rank_BT.argsort(dim=1))
    theirs_BK = torch.tensor(GOLDEN["egspo-sa"]["step_advantages"])
    assert theirs_BK.shape[1] == of_row.num_step_answers(SLOTS)
    torch.testing.assert_close(in_order_BT[:, : theirs_BK.shape[1]], theirs_BK, rtol=1e-5, atol=1e-6)


def test_advantages_of_predictions_equal_the_public_code() -> None:
    ours_BT = grouped_example("mdpo").step_advantages
    assert ours_BT is not None
    torch.testing.assert_close(ours_BT, torch.tensor(GOLDEN["mdpo"]["step_advantages"]), rtol=1e-5, atol=1e-5)


def test_advantages_of_nodes_equal_the_public_code() -> None:
    batch = example(SOURCES["d-treerpo"])
    assert batch.node_keys is not None
    ours_BD = node_advantages(Rewards.of(batch), batch.node_keys, config("d-treerpo").advantage)
    torch.testing.assert_close(ours_BD, torch.tensor(GOLDEN["d-treerpo"]["node_advantages"]), rtol=1e-5, atol=1e-6)


def test_golden_numbers_belong_to_algorithms() -> None:
    assert set(GOLDEN) == set(SOURCES) <= set(ALGORITHMS)
