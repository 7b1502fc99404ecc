"""Loss and gradient of every algorithm against its paper's formula, for any split into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from learner.advantages import Rewards, prediction_advantages
from learner.algorithms import ALGORITHMS
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.counter import uniform
from learner.estimators import Corruption, InnerUpdate, SamplerFacts, random_masks, shown_future
from learner.estimators.trajectory import CHOICE_KEY
from learner.learner import Learner
from learner.model.networks import make_model
from learner.model.transformer import Transformer
from learner.optimizer import StepResult
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.teacher import Teacher
from learner.round import WEIGHING
from learner.value.model import ValueTransformer
from tests.learner import slow

SCORED_AS_SAMPLED = ("agrpo", "tba", "mdpo")
SAMPLER = SamplerFacts(temperature=0.7, block_length=4, has_fallback=True, has_varying_steps=True)


def algorithm_sampler(name: str) -> SamplerFacts:
    """Return sampler facts that suit the algorithm."""
    if name == "mdpo":
        return replace(SAMPLER, max_denoise_steps=slow.WHOLE_CANVAS, has_varying_steps=False)
    if name == "d-treerpo":
        return replace(SAMPLER, has_varying_steps=False)
    return replace(SAMPLER, block_length=1) if name == "justgrpo" else SAMPLER


# Changes that suit the fixture's completions, of at most four steps.
_SCALED: dict[str, dict[str, object]] = {
    # Its rewards are not accuracies. The two steps are minibatches of a single sweep.
    "tracerl": {
        "filters": {"min_accuracy": 0.0, "max_accuracy": 1.0},
        "estimator": {"steps_per_segment": 2},
        "inner_updates": 1,
        "num_minibatches": 2,
    },
    "stepmerge": {"estimator": {"num_segments": 2}},
    "agrpo": {"estimator": {"num_sampled": 3}},
    "mapg": {"estimator": {"num_segments": 2, "num_sampled": 1}},
    # The second of two rounds: the first one has no consistency loss. A weight that shows in the gradient.
    "d-treerpo": {
        "num_rounds": 2,
        "group_size": 4,
        "estimator": {"branches": (2, 2)},
        "consistency": {"max_coef": 0.5},
    },
    "mdpo": {"estimator": {"num_states": 2}},
    "opdlm": {"num_minibatches": 1},
    # About the median of an untrained policy's tokens, and fewer states than most completions have.
    "rldf": {"objective": {"min_probability": 0.03}, "estimator": {"num_sampled": 2, "temperature": 0.2}},
    # All completions are trained on, as by the other methods.
    "d-opsd": {"filters": {"first_correct": False}},
}
_SCALED["tracerl-value"] = {**_SCALED["tracerl"], "value": {"gamma": 0.9, "lam": 0.8}}


def algorithm_config(name: str, **changes: object) -> LearnerConfig:
    """Return the algorithm's config for two optimizer steps, scaled to the fixture's completions."""
    settings: dict[str, object] = {"algorithm": name, "num_rounds": 1, "inner_updates": 2, "lr": 1e-3}
    return LearnerConfig.model_validate(settings | _SCALED.get(name, {}) | changes)


class Recorder:
    """A fake optimizer: records the gradients of every step, and moves the policy by known noise."""

    def __init__(self, model: Transformer, move: Callable[[Transformer], Transformer]) -> None:
        self._model, self._move = model, move
        self.gradients: list[dict[str, Tensor]] = []
        self.loss = 0.0

    def rollback(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, lr: float, max_grad_norm: float, loss: Tensor) -> StepResult:
        self.gradients.append(
            {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}
        )
        self._move(self._model)
        self._model.zero_grad()
        return StepResult(loss=0.0, grad_norm=0.0)


def moved(model: Transformer) -> Transformer:
    """Shift the policy's weights by fixed noise."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def sharpened(model: Transformer) -> Transformer:
    """Make the policy more confident: random tokens, which it finds improbable, become less likely."""
    with torch.no_grad():
        model.head.weight.mul_(1.1)
    return model


def flattened(model: Transformer) -> Transformer:
    """Make the policy less confident: random tokens become more likely."""
    with torch.no_grad():
        model.head.weight.mul_(0.9)
    return model


def _copy(model: Transformer, dtype: torch.dtype = torch.float32) -> Transformer:
    copied = make_model(model.config)
    copied.load_state_dict(model.state_dict())
    return copied.to(dtype)


def _gradients(
    model: Transformer,
    config: LearnerConfig,
    batch: RolloutBatch,
    sampler: SamplerFacts,
    move: Callable[[Transformer], Transformer] = moved,
) -> Recorder:
    """Record the gradients of both steps. Reference and teacher are the policy moved twice."""
    learner = Learner(ShardedPolicy(model, None), config, sampler)
    if learner.reference is not None:
        moved(moved(learner.reference.module))
    if isinstance(learner.teacher, Teacher):
        moved(moved(learner.teacher.model.module))
    if learner.value is not None:
        moved(learner.value.network.module)
    recorder = Recorder(model, move)
    learner.optimizer = recorder  # type: ignore[assignment]
    metrics = learner.update(batch, config.num_rounds - 1)
    assert metrics["num_trained_completions"] == batch.num_rows
    recorder.loss = metrics["loss"]
    return recorder


def gradients_of_two_steps(
    model: Transformer, config: LearnerConfig, batch: RolloutBatch, sampler: SamplerFacts
) -> list[dict[str, Tensor]]:
    """Return the gradients of both steps of an update of a copy, by parameter."""
    return _gradients(_copy(model), config, batch, sampler).gradients


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_equal_the_papers_formula(
    name: str, policy: Transformer, rollouts: RolloutBatch, grouped: GroupedBatch
) -> None:
    """Over two steps: at the second, new, old and reference policy differ."""
    config, sampler = algorithm_config(name), algorithm_sampler(name)
    old, first = _copy(policy, torch.float64), _copy(policy, torch.float64)
    second = moved(_copy(policy)).to(torch.float64)
    reference = moved(moved(_copy(policy))).to(torch.float64)
    if name == "dmpo":
        masks = config.estimator.corrupt(grouped, InnerUpdate(WEIGHING, config.inner_updates), sampler)
        slow.NUM_DRAWS["value"] = 2
        slow.rhos[:] = slow.rho(slow.rows_of((first, old, reference), grouped, masks))
    if name == "mdpo":
        assert rollouts.step_rewards is not None
        of_steps = prediction_advantages(Rewards.of(rollouts), rollouts.step_rewards, sampler.max_denoise_steps)
        grouped = replace(grouped, step_advantages=of_steps)
    if name == "opdlm":
        slow.TEACHER[:] = _causal_logps(reference, grouped)
    if name == "tracerl-value":
        masks = config.estimator.corrupt(grouped, InnerUpdate(0, 1), sampler)
        slow.VALUES[:] = values_of(moved_value_network(policy).double(), grouped, masks)
        slow.GAMMA_LAM |= {"gamma": 0.9, "lam": 0.8}
    losses = []
    for step, new in enumerate((first, second)):
        update = InnerUpdate(step // config.num_minibatches, config.inner_updates)
        corruption = config.estimator.corrupt(grouped, update, sampler)
        rows = slow.rows_of(
            (new, old, reference), grouped, corruption, sampler.temperature if name in SCORED_AS_SAMPLED else None
        )
        if name == "d-opsd":
            shown = shown_future(grouped.select(corruption.rows), corruption.parts, 0.25, sampler)
            slow.FUTURES[:] = slow.self_taught(reference, grouped, corruption, shown)
        slow.update_index["value"] = update.index
        slow.minibatch |= {"index": step % config.num_minibatches, "count": config.num_minibatches}
        _tell(name, config, grouped, update)
        loss = slow.SLOW[name](rows)
        loss.backward()
        losses.append(loss.item())
    recorder = _gradients(policy, config, rollouts, sampler)
    assert recorder.loss == pytest.approx(sum(losses) / 2, rel=2e-5, abs=1e-5)
    _assert_gradients(recorder, [first, second])
    assert any(float(gradient.abs().max()) > 1e-5 for gradient in recorder.gradients[1].values())


def moved_value_network(policy: Transformer) -> Transformer:
    """Return the value network that `_gradients` trains: the policy with a head of zeros, moved once."""
    network = ValueTransformer(policy.config)
    backbone = {name: weight for name, weight in policy.state_dict().items() if name != "head.weight"}
    network.load_state_dict(backbone | {"head.weight": torch.zeros(1, policy.config.d_model)})
    return moved(network)


@torch.no_grad()
def values_of(network: Transformer, batch: GroupedBatch, corruption: Corruption) -> list[dict[int, list[float]]]:
    """Return the value of each slot of each row, by the part of its canvas, computed one canvas at a time."""
    assert corruption.parts is not None
    found: list[dict[int, list[float]]] = [{} for _ in range(batch.num_rows)]
    for row, part, masked in zip(corruption.rows.tolist(), corruption.parts.tolist(), corruption.masked, strict=True):
        prompt = batch.prompt_ids[row, : batch.prompt_lengths[row]]
        completion = batch.completion_ids[row].masked_fill(masked, network.config.mask_token_id)
        found[row][part] = network(torch.cat((prompt, completion))[None])[0, len(prompt) :, 0].tolist()
    return found


def _causal_logps(model: Transformer, batch: GroupedBatch) -> list[Tensor]:
    """Return the log-probabilities [L, V] of each row's slots, from the outputs one slot earlier."""
    causal = make_model(model.config.model_copy(update={"block_length": 1})).double()
    causal.load_state_dict(model.state_dict())
    found = []
    for row in range(batch.num_rows):
        prompt = batch.prompt_ids[row, : batch.prompt_lengths[row]]
        ids = torch.cat((prompt, batch.completion_ids[row]))
        found.append(causal(ids[None])[0, len(prompt) - 1 : -1].log_softmax(-1).detach())
    return found


def _assert_gradients(recorder: Recorder, news: list[Transformer]) -> None:
    """Compare each step's gradients with those of the restatement at that step's policy."""
    for new, gradients in zip(news, recorder.gradients, strict=True):
        for parameter_name, expected in new.named_parameters():
            assert expected.grad is not None
            actual = gradients[parameter_name].to(torch.float64)
            scale = max(1e-3, float(expected.grad.abs().max()))
            assert float((actual - expected.grad).abs().max()) < 2e-4 * scale, parameter_name


@pytest.mark.parametrize("name", ["diffu-grpo", "coupled-grpo", "espo", "stabledrl"])
def test_minibatch_steps_equal_the_papers_formula(
    name: str, policy: Transformer, rollouts: RolloutBatch, grouped: GroupedBatch
) -> None:
    """Two sweeps of three steps, each step on one group. Old likelihoods are from the start of the round, and masks are
    fixed for the round."""
    config, sampler = algorithm_config(name, num_minibatches=3), algorithm_sampler(name)
    old, reference = _copy(policy, torch.float64), moved(moved(_copy(policy))).to(torch.float64)
    at, news, losses = _copy(policy), [], []
    for step in range(6):
        news.append(_copy(at, torch.float64))
        corruption = config.estimator.corrupt(grouped, update := InnerUpdate(step // 3, 2), sampler)
        rows = slow.rows_of((news[-1], old, reference), grouped, corruption)
        _tell(name, config, grouped, update)
        loss = slow.SLOW[name](rows[step % 3 * 4 : step % 3 * 4 + 4])
        loss.backward()
        losses.append(loss.item())
        moved(at)
    recorder = _gradients(policy, config, rollouts, sampler)
    assert recorder.loss == pytest.approx(sum(losses) / 6, rel=2e-5, abs=1e-5)
    _assert_gradients(recorder, news)


@pytest.mark.parametrize(("name", "count", "num_steps"), [("espo", 5, 5), ("agrpo", 50, 12), ("dmpo", 2, 2)])
def test_minibatch_gradients_add_up_to_the_whole_round(
    name: str, count: int, num_steps: int, policy: Transformer, rollouts: RolloutBatch
) -> None:
    """With a fixed policy. Each step is weighted by its share of the completions, or of the groups for group losses."""
    configs = [algorithm_config(name, inner_updates=1, num_minibatches=number) for number in (1, count)]
    whole, steps = (
        _gradients(_copy(policy), config, rollouts, algorithm_sampler(name), lambda model: model).gradients
        for config in configs
    )
    assert len(steps) == num_steps
    units = 3 if name == "dmpo" else 12
    ends = [-(-place * units // num_steps) for place in range(num_steps + 1)]
    shares = [(end - begin) / units for begin, end in pairwise(ends)]
    for parameter, expected in whole[0].items():
        total = sum(share * gradients[parameter] for share, gradients in zip(shares, steps, strict=True))
        scale = max(1e-3, float(expected.abs().max()))
        assert float((total - expected).abs().max()) < 1e-4 * scale, parameter


def test_clip_and_kl_of_tracerl_have_a_gradient_after_the_first_step(
    policy: Transformer, rollouts: RolloutBatch
) -> None:
    settings = {"algorithm": "tracerl", "num_rounds": 1, "lr": 1e-2, "max_grad_norm": 1e9, "filters": {}}
    one_step, row = (
        Learner(ShardedPolicy(_copy(policy), None), LearnerConfig.model_validate(settings | changes), SAMPLER)
        for changes in ({"num_minibatches": 1}, {})
    )
    standing, moving = one_step.update(rollouts, 0), row.update(rollouts, 0)
    assert (standing["kl"], standing["clip_ratio/region_mean"]) == (pytest.approx(0, abs=1e-7), 0)
    assert moving["kl"] > 1e-3
    assert moving["clip_ratio/region_mean"] > 0


def _tell(name: str, config: LearnerConfig, grouped: GroupedBatch, update: InnerUpdate) -> None:
    """Pass the formula its random draws other than masks."""
    slow.NUM_DRAWS["value"] = getattr(config.estimator, "num_draws", 1)
    slow.MIN_PROBABILITY["value"] = getattr(config.objective, "min_probability", None) or 0.0
    slow.NUM_SEGMENTS["value"] = getattr(config.estimator, "num_segments", None) or 1
    if name == "coupled-grpo":
        slow.MASK_RATIO["value"] = (
            0.2 + 0.6 * uniform(grouped.sample_keys[:1], update.index, random_masks._RATIO_KEY).item()
        )
    if name == "agrpo":
        slow.num_drawn["value"] = config.estimator.num_sampled  # type: ignore[union-attr]
        slow.starts[:] = uniform(grouped.sample_keys, update.index, CHOICE_KEY).tolist()


def _coefficients() -> list[tuple[str, str, str]]:
    """Return every number and switch of estimator and objective in the table of algorithms."""
    return [
        (name, section, key)
        for name, row in ALGORITHMS.items()
        for section in ("estimator", "objective", "value", "consistency")
        for key, value in row.get(section, {}).items()
        # The clip of values acts on the value model, and so on the policy's next round.
        if isinstance(value, int | float) and key != "requires_block_length" and (section, key) != ("value", "clip")
    ]


def _others(value: object, key: str) -> list[object]:
    """Return other values, different enough to show within two updates that hardly move the policy."""
    if isinstance(value, bool):
        return [not value]
    if key.startswith("clip_"):
        return [1e-4, 0.99 if key == "clip_low" else 50.0]
    if isinstance(value, int):
        return [value - 1 if value > 2 else value + 1]
    assert isinstance(value, float)
    return [value / 2, value * 1.4] if value else [0.4]


@pytest.mark.parametrize(("name", "section", "key"), _coefficients())
def test_every_coefficient_of_an_algorithm_affects_the_update(
    name: str, section: str, key: str, policy: Transformer, rollouts: RolloutBatch
) -> None:
    config, sampler = algorithm_config(name), algorithm_sampler(name)
    values = _others(getattr(getattr(config, section), key), key)
    others = list(_configs(config, section, key, values))
    if not others:
        pytest.skip("another value would be another method, which is refused")
    # The ratios increase in some of these moves, and decrease in others.
    for other, move in product(others, (moved, sharpened, flattened)):
        before, after = (_gradients(_copy(policy), one, rollouts, sampler, move) for one in (config, other))
        if _largest_change(before, after) > 1e-3:
            return
    pytest.fail(f"{section}.{key} = {values} change nothing")


def _configs(config: LearnerConfig, section: str, key: str, values: list[object]) -> Iterator[LearnerConfig]:
    """Yield the config with each value that passes validation."""
    for value in values:
        whole = config.model_dump()
        whole[section][key] = value
        with suppress(ValidationError):
            yield LearnerConfig.model_validate(whole)


def _largest_change(before: Recorder, after: Recorder) -> float:
    """Return the largest change of a parameter's gradient in a step, relative to its largest element."""
    return max(
        float((gradients[parameter] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-9))
        for gradients, others in zip(after.gradients, before.gradients, strict=True)
        for parameter, gradient in others.items()
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_small_micro_batches_give_the_gradient_of_the_whole_batch(
    name: str, policy: Transformer, rollouts: RolloutBatch
) -> None:
    """A budget of one canvas splits a completion's draws over micro-batches: the gradients of two sweeps stay
    the same."""
    _check_micro_batches(name, policy, rollouts, algorithm_sampler(name), (14, 40))


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if name not in ("mapg", "d-opsd", "mdpo", "rldf", "d-treerpo")]
)
def test_every_algorithm_trains_a_block_causal_policy(name: str, policy: Transformer, rollouts: RolloutBatch) -> None:
    """All methods except mapg, d-opsd, mdpo and rldf, which look at slots of later blocks, or predict them, and
    d-treerpo, whose levels are of steps. Micro-batches also split a row's draws."""
    causal = make_model(policy.config.model_copy(update={"family": "sdar", "block_length": 4}))
    causal.load_state_dict(policy.state_dict())
    sampler = replace(algorithm_sampler(name), is_block_causal=True)
    _check_micro_batches(name, causal, rollouts, sampler, (30, 100))


def _check_micro_batches(
    name: str, policy: Transformer, rollouts: RolloutBatch, sampler: SamplerFacts, budgets: tuple[int, ...]
) -> None:
    """Compare two updates' nonzero gradients in one micro-batch and in several, with these token budgets."""
    whole = _gradients(_copy(policy), algorithm_config(name), rollouts, sampler).gradients
    assert all(float(torch.stack([g.abs().max() for g in gradients.values()]).max()) > 0 for gradients in whole)
    for max_tokens in budgets:
        config = algorithm_config(name, micro_batch_tokens=max_tokens)
        cut = _gradients(_copy(policy), config, rollouts, sampler).gradients
        for update in (0, 1):
            for parameter, expected in whole[update].items():
                scale = max(1e-3, float(expected.abs().max()))
                difference = (cut[update][parameter] - expected).abs().max()
                assert float(difference) < 1e-4 * scale, (max_tokens, update, parameter)


def test_a_round_without_a_better_sibling_has_no_consistency_loss(policy: Transformer, rollouts: RolloutBatch) -> None:
    """Its targets have no weight that could be scaled to the loss's coefficient."""
    equal = replace(rollouts, rewards=torch.ones_like(rollouts.rewards))
    config = algorithm_config("d-treerpo", consistency={"max_coef": 20.0})
    learner = Learner(ShardedPolicy(policy, None), config, algorithm_sampler("d-treerpo"))
    metrics = learner.update(equal, 1)
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)
