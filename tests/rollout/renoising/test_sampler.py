"""The renoising sampler and its likelihoods, against the original code and plain forwards."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.estimators.renoised import kept_logps
from learner.model.renoising.config import RenoisingConfig, is_renoising
from learner.model.renoising.policy import RenoisingPolicy, load_renoising_policy
from rollout.field_error import FieldError
from rollout.renoising.random_source import KeyedRandomSource
from rollout.renoising.request import RenoisedCompletion, RenoisingParams, RenoisingRequest
from rollout.renoising.row import within_bound
from rollout.renoising.sampler import RenoisingSampler
from rollout.request import FinishReason
from rollout.token_sampling import Predictions, predictions

PARAMS = RenoisingParams(gen_length=20, max_denoise_steps=6, entropy_bound=2.0)


@dataclass(frozen=True)
class Recorded:
    """The random draws recorded in a fixture."""

    blocks: list[dict[str, Any]]

    def initial(self, canvas: int) -> Tensor:
        return torch.tensor(self.blocks[canvas]["initial"])

    def tokens(self, canvas: int, step: int, predicted: Predictions) -> Tensor:
        return torch.tensor(self.blocks[canvas]["steps"][step]["sampled"])

    def fresh(self, canvas: int, step: int) -> Tensor:
        return torch.tensor(self.blocks[canvas]["steps"][step]["next"])


@pytest.fixture(scope="module")
def original(shared: Path) -> tuple[Path, RenoisingPolicy]:
    directory = shared / "fixtures" / "diffusiongemma-tiny"
    return directory, load_renoising_policy(directory)


def test_logits_equal_the_original_codes(original: tuple[Path, RenoisingPolicy]) -> None:
    """With prompts within and beyond the attention window, at a first step and at a self-conditioned one."""
    directory, policy = original
    expected = load_file(directory / "expected.safetensors")
    for which in ("short", "long"):
        for row in range(2):
            prefix = policy.prefix()
            policy.append(prefix, expected[f"{which}.input_ids"][row])
            first = policy(prefix, expected[f"{which}.canvas"][row])
            torch.testing.assert_close(first, expected[f"{which}.logits"][row], atol=5e-4, rtol=0)
            conditioning = expected[f"{which}.self_conditioning_logits"][row]
            second = policy(prefix, expected[f"{which}.canvas2"][row], conditioning)
            torch.testing.assert_close(second, expected[f"{which}.logits2"][row], atol=5e-4, rtol=0)


def _settings(directory: Path) -> Iterator[tuple[dict[str, Any], int, RenoisingRequest]]:
    for setting in json.loads((directory / "expected_generations.json").read_text()):
        params = RenoisingParams(
            gen_length=setting["max_new_tokens"],
            max_denoise_steps=setting["max_denoising_steps"],
            **{key: setting[key] for key in ("entropy_bound", "t_min", "t_max")},
            **{key: setting[key] for key in ("stability_threshold", "confidence_threshold")},
        )
        stop = setting["eos_token_id"]
        stop_ids = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
        for row, prompt in enumerate(setting["prompt"]):
            yield setting, row, RenoisingRequest(prompt_ids=tuple(prompt), params=params, seed=0, stop_ids=stop_ids)


def test_with_recorded_draws_every_step_equals_the_original(original: tuple[Path, RenoisingPolicy]) -> None:
    directory, policy = original
    num_steps = 0
    for setting, row, request in _settings(directory):
        completion = RenoisingSampler(policy, 0).complete(request, Recorded(setting["blocks"][row]))
        assert completion.token_ids.tolist() == setting["output"][row]
        # At a temperature of 1e-4 the logits amplify rounding errors.
        is_greedy = setting["t_max"] < 1e-2
        for canvas, block in zip(completion.canvases, setting["blocks"][row], strict=True):
            seen = [block["initial"], *(step["next"] for step in block["steps"][:-1])]
            assert canvas.seen.tolist() == seen
            assert canvas.argmax.tolist() == [step["argmax"] for step in block["steps"]]
            assert canvas.accepted.tolist() == [[bool(one) for one in step["accepted"]] for step in block["steps"]]
            assert canvas.mean_entropy == pytest.approx([step["mean_entropy"] for step in block["steps"]], abs=1e-4)
            if not is_greedy:
                logps = np.array([step["sampled_logp"] for step in block["steps"]])
                assert np.abs(canvas.drawn_logp - logps).max() < 2e-4
            num_steps += canvas.num_steps
        if not is_greedy:
            _check_likelihood(policy, request, completion)
    assert num_steps > 30


def _check_likelihood(policy: RenoisingPolicy, request: RenoisingRequest, completion: RenoisedCompletion) -> None:
    with torch.no_grad():
        found = kept_logps(policy, request.prompt_ids, completion.canvases)
    recorded = np.concatenate([canvas.drawn_logp[canvas.accepted] for canvas in completion.canvases])
    assert found.numpy() == pytest.approx(recorded, abs=1e-4)


def _requests() -> list[RenoisingRequest]:
    prompts = [(5, 6, 7), (8,) * 15, (9,)]
    return [RenoisingRequest(prompt_ids=prompt, params=PARAMS, seed=i, stop_ids=()) for i, prompt in enumerate(prompts)]


def test_a_seed_determines_a_completion_and_its_likelihood(renoising_policy: RenoisingPolicy) -> None:
    sampler = RenoisingSampler(renoising_policy, 7)
    completions = sampler.generate(_requests())
    again = [sampler.complete(request) for request in reversed(_requests())][::-1]
    for request, one, other in zip(_requests(), completions, again, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.num_tokens, len(one.token_ids), one.policy_version) == (20, 24, 7)
        assert (one.finish_reason, one.num_forwards) == (FinishReason.LENGTH, sum(c.num_steps for c in one.canvases))
        assert all(canvas.accepted.any(axis=1).all() for canvas in one.canvases), "a step keeps one slot at least"
        _check_likelihood(renoising_policy, request, one)
    other_seed = RenoisingRequest(prompt_ids=(5, 6, 7), params=PARAMS, seed=99, stop_ids=())
    assert sampler.complete(other_seed).token_ids.tolist() != completions[0].token_ids.tolist()


def test_the_kv_cache_of_finished_canvases_is_exact(renoising_policy: RenoisingPolicy) -> None:
    """The logits of the second canvas are equal with the KV cache and with a newly encoded prompt."""
    (request, *_) = _requests()
    completion = RenoisingSampler(renoising_policy, 0).complete(request)
    second = completion.canvases[1]
    whole = torch.tensor([*request.prompt_ids, *completion.canvases[0].token_ids.tolist()])
    with torch.no_grad():
        prefix = renoising_policy.prefix()
        renoising_policy.append(prefix, whole)
        logits = renoising_policy(prefix, torch.from_numpy(second.seen[0]).long()) / PARAMS.temperature(0)
    logps = logits.log_softmax(-1).gather(1, torch.from_numpy(second.drawn[0]).long()[:, None])[:, 0]
    assert second.drawn_logp[0] == pytest.approx(logps.numpy(), abs=1e-4)


def test_the_likelihoods_gradient_equals_finite_differences(renoising_checkpoint: Path) -> None:
    """Gradients pass through the encoder, the decoder and the chain of self-conditioned steps."""
    policy = load_renoising_policy(renoising_checkpoint)
    request = _requests()[0]
    canvases = RenoisingSampler(policy, 0).complete(request).canvases
    for name in ("decoder.layers.0.mlp.up_proj.weight", "decoder.self_conditioning.up_proj.weight"):
        weight = policy.network.model.get_parameter(name)
        weight.requires_grad_()
        kept_logps(policy, request.prompt_ids, canvases).sum().backward()
        assert weight.grad is not None
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
        slope, step = float((weight.grad * direction).sum()), 1e-3
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                weight.add_(direction, alpha=sign * step)
                values.append(float(kept_logps(policy, request.prompt_ids, canvases).sum()))
                weight.sub_(direction, alpha=sign * step)
        assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2)
        weight.requires_grad_(requires_grad=False)


def test_draws_follow_softmax_and_fresh_ids_are_uniform() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(4000, -1)
    random_source = KeyedRandomSource(3, 4000, 4, torch.device("cpu"))
    predicted = predictions(logits.clone())
    counts = torch.bincount(random_source.tokens(0, 0, predicted), minlength=4) / 4000
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=0.03, rtol=0)
    for ids in (
        random_source.initial(0),
        random_source.initial(1),
        random_source.fresh(0, 0),
        random_source.fresh(0, 1),
        random_source.fresh(1, 0),
    ):
        torch.testing.assert_close(torch.bincount(ids, minlength=4) / 4000, torch.full((4,), 0.25), atol=0.03, rtol=0)
    kinds = [
        random_source.initial(0),
        random_source.initial(1),
        random_source.fresh(0, 0),
        random_source.fresh(0, 1),
        random_source.fresh(1, 0),
    ]
    assert len({tuple(ids.tolist()) for ids in kinds}) == len(kinds), "each choice has draws of its own"


@pytest.mark.parametrize(("bound", "kept"), [(0.0, [1]), (0.1, [1, 3]), (0.35, [1, 3, 0]), (9.0, [0, 1, 2, 3])])
def test_a_step_keeps_the_lowest_entropies_up_to_the_bound(bound: float, kept: list[int]) -> None:
    entropy = torch.tensor([0.3, 0.05, 0.9, 0.25])
    assert within_bound(entropy, bound).nonzero()[:, 0].tolist() == sorted(kept)


class _Scripted:
    """A fake policy: its most probable tokens are 1, 2, then always 3, and from the fifth step on it is confident."""

    device = torch.device("cpu")
    config = RenoisingConfig(vocab_size=4, canvas_length=2, stop_ids=(), pad_token_id=0, max_sequence_length=64)

    def __init__(self) -> None:
        self._steps = 0

    def prefix(self) -> None:
        return None

    def append(self, _prefix: object, _ids: Tensor) -> None:
        self._steps = 0

    def __call__(self, *_: object) -> Tensor:
        logits = torch.zeros(2, 4)
        logits[:, min(3, 1 + self._steps)] = 2.0 if self._steps < 4 else 50.0
        self._steps += 1
        return logits


@pytest.mark.parametrize(
    ("stability", "confidence", "num_steps"),
    [(0, 9.0, 1), (1, 9.0, 4), (2, 9.0, 5), (3, 9.0, 6), (1, 1e-3, 5), (3, 1e-3, 6), (0, 0.0, 8), (7, 9.0, 8)],
)
def test_a_canvas_ends_when_stable_and_confident(stability: int, confidence: float, num_steps: int) -> None:
    params = RenoisingParams(
        gen_length=4,
        max_denoise_steps=8,
        t_min=1.0,
        t_max=1.0,
        stability_threshold=stability,
        confidence_threshold=confidence,
    )
    sampler = RenoisingSampler(_Scripted(), 0)  # type: ignore[arg-type]
    completion = sampler.complete(RenoisingRequest(prompt_ids=(1,), params=params, seed=0))
    assert [canvas.num_steps for canvas in completion.canvases] == [num_steps] * 2


def test_a_text_ends_at_its_first_stop_id_and_padding_follows(renoising_policy: RenoisingPolicy) -> None:
    free = RenoisingSampler(renoising_policy, 0).complete(_requests()[0])
    stop = int(Counter(free.token_ids[:8].tolist()).most_common()[-1][0])
    request = RenoisingRequest(prompt_ids=(5, 6, 7), params=PARAMS, seed=0, stop_ids=(stop,))
    ended = RenoisingSampler(renoising_policy, 0).complete(request)
    place = free.token_ids.tolist().index(stop)
    assert (ended.num_tokens, ended.finish_reason) == (place + 1, FinishReason.EOS)
    assert ended.token_ids[: place + 1].tolist() == free.token_ids[: place + 1].tolist()
    assert set(ended.token_ids[place + 1 :].tolist()) <= {renoising_policy.config.pad_token_id}
    assert len(ended.canvases) == 1


def test_on_step_is_called_for_every_step(renoising_policy: RenoisingPolicy) -> None:
    watched: list[tuple[int, int]] = []
    canvases: list[list[int]] = []

    def watch(canvas: int, step: int, ids: Tensor, kept: Tensor) -> None:
        watched.append((canvas, step))
        canvases.append(ids.tolist())
        assert kept.dtype is torch.bool

    completion = RenoisingSampler(renoising_policy, 0).complete(_requests()[0], on_step=watch)
    assert watched == [(n, step) for n, canvas in enumerate(completion.canvases) for step in range(canvas.num_steps)]
    assert canvases[0] == completion.canvases[0].seen[1].tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_ids": ()}, "request 0: prompt_ids is empty"),
        ({"prompt_ids": (60,)}, "request 0: prompt_ids has 60; the policy's token ids are 0 to 59"),
        ({"prompt_ids": (3,) * 50}, "make 74 tokens; the policy takes at most 64"),
        ({"seed": -1}, "request 0: seed -1 is not between 0 and"),
        ({"stop_ids": (99,)}, "request 0: stop_ids has 99"),
    ],
)
def test_invalid_requests_are_refused(renoising_policy: RenoisingPolicy, changes: dict[str, Any], said: str) -> None:
    request = RenoisingRequest(**{"prompt_ids": (5,), "params": PARAMS, "seed": 0} | changes)
    with pytest.raises(ValueError, match=said):
        RenoisingSampler(renoising_policy, 0).generate([request])


def test_a_rising_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"t_min 0\.9 is above t_max 0\.8") as caught:
        RenoisingParams(t_min=0.9)
    assert not isinstance(caught.value, FieldError), "pydantic's own, with the field error in it"


def test_non_finite_weights_raise(renoising_checkpoint: Path) -> None:
    policy = load_renoising_policy(renoising_checkpoint)
    with torch.no_grad():
        policy.network.model.decoder.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite on canvas 0: bad weights"):
        RenoisingSampler(policy, 0).complete(_requests()[0])


def test_other_or_damaged_checkpoints_are_refused(renoising_checkpoint: Path, tmp_path: Path, original: Any) -> None:
    assert is_renoising(original[0])
    assert not is_renoising(tmp_path)
    with pytest.raises(ValueError, match="is no checkpoint of model_type 'diffusion_gemma'"):
        load_renoising_policy(tmp_path)
    torn = shutil.copytree(renoising_checkpoint, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match="torn cannot be loaded"):
        load_renoising_policy(torn)
