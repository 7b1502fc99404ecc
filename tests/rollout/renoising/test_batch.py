"""Batched renoising: each row equals its completion alone, despite cancellation and resumption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.model.renoising.policy import RenoisingPolicy
from rollout.renoising.request import RenoisedCompletion, RenoisingParams, RenoisingRequest, check_renoising_request
from rollout.renoising.sampler import RenoisingBatch, RenoisingSampler
from rollout.request import Committed, Completion, Progress

PARAMS = RenoisingParams(gen_length=20, max_denoise_steps=6, entropy_bound=6.0)
SLOTS = 8
REQUESTS = [
    RenoisingRequest(prompt_ids=(5, 6, 7), params=PARAMS, seed=1, stop_ids=()),
    RenoisingRequest(prompt_ids=(8,) * 15, params=PARAMS.model_copy(update={"gen_length": 8}), seed=2, stop_ids=()),
    RenoisingRequest(prompt_ids=(9,), params=PARAMS.model_copy(update={"max_denoise_steps": 3}), seed=3, stop_ids=()),
]


def _drained(batch: RenoisingBatch) -> tuple[dict[int, Completion], list[dict[int, Progress]]]:
    """Run a batch to its end; return its completions, and the progress of all rows after each step."""
    done, seen = dict[int, Completion](), list[dict[int, Progress]]()
    while batch.num_running or batch.num_waiting or not seen:
        done.update(batch.step())
        seen.append(batch.progress(range(9)))
    return done, seen


def _frames(alone: RenoisedCompletion) -> list[tuple[list[bool], list[int]]]:
    """Derive from the record which slots are masked after each step but the last, and the tokens of the others."""
    frames = []
    for number, canvas in enumerate(alone.canvases):
        finished = [token for one in alone.canvases[:number] for token in one.token_ids.tolist()]
        later = (len(alone.canvases) - number - 1) * SLOTS
        for step in range(canvas.num_steps):
            kept, drawn = canvas.accepted[step], canvas.drawn[step]
            if step == canvas.num_steps - 1:
                kept, drawn = np.ones(SLOTS, dtype=bool), canvas.token_ids
            masked = [False] * len(finished) + (~kept).tolist() + [True] * later
            frames.append((masked, finished + drawn[kept].tolist()))
    return frames[:-1]


def test_batched_rows_equal_their_completions_alone(renoising_policy: RenoisingPolicy) -> None:
    sampler = RenoisingSampler(renoising_policy, 4)
    alone = [sampler.complete(request) for request in REQUESTS]
    batch = sampler.open()
    assert [batch.submit(request) for request in REQUESTS] == [0, 1, 2]
    done, seen = _drained(batch)
    for index, one in enumerate(alone):
        whole = [token for canvas in one.canvases for token in canvas.token_ids.tolist()]
        completion = done[index]
        assert completion.token_ids.tolist() == whole
        assert (completion.num_tokens, completion.finish_reason) == (one.num_tokens, one.finish_reason)
        assert (completion.num_forwards, completion.policy_version) == (one.num_forwards, 4)
        shown = [progress[index] for progress in seen if index in progress]
        found = [(each.masked.tolist(), each.slots.token_ids[~each.masked].tolist()) for each in shown]
        assert found == _frames(one)
        assert [each.num_steps for each in shown] == list(range(1, one.num_forwards))
        assert all(each.num_committed % SLOTS == 0 for each in shown)
    # Rows take turns, so that all advance in each step.
    assert [sorted(progress) for progress in seen[:2]] == [[0, 1, 2]] * 2


def test_renoised_slots_lose_their_step_and_kept_ones_keep_it(renoising_policy: RenoisingPolicy) -> None:
    sampler = RenoisingSampler(renoising_policy, 0)
    batch = sampler.open()
    batch.submit(REQUESTS[0])
    done, seen = _drained(batch)
    num_lost = num_stayed = 0
    before: Progress | None = None
    for now in (progress[0] for progress in seen if progress):
        held = ~now.masked
        assert (now.slots.step_map[held] >= 0).all()
        assert (now.slots.step_map[~held] == -1).all()
        if before is not None and before.num_committed == now.num_committed:
            stays = held & ~before.masked & (now.slots.token_ids == before.slots.token_ids)
            assert (now.slots.step_map[stays] == before.slots.step_map[stays]).all()
            assert (now.slots.step_map[held & ~stays] == now.num_steps - 1).all()
            num_lost += int((~before.masked & now.masked).sum())
            num_stayed += int(stays[now.num_committed :].sum())
        before = now
    assert num_lost > 3, "or nothing is tested here"
    assert num_stayed > 3
    # A canvas is committed as a whole, in its last step.
    ends = np.cumsum([canvas.num_steps for canvas in sampler.complete(REQUESTS[0]).canvases]) - 1
    assert done[0].step_map.tolist() == np.repeat(ends, SLOTS).tolist()


def test_slots_record_the_log_probs_they_were_drawn_from(renoising_policy: RenoisingPolicy) -> None:
    sampler = RenoisingSampler(renoising_policy, 0)
    (canvas, *_) = sampler.complete(REQUESTS[0]).canvases
    batch = sampler.open()
    batch.submit(REQUESTS[0])
    batch.step()
    kept, slots = canvas.accepted[0], batch.progress([0])[0].slots
    with torch.no_grad():
        prefix = renoising_policy.prefix()
        renoising_policy.append(prefix, torch.tensor(REQUESTS[0].prompt_ids))
        raw = renoising_policy(prefix, torch.from_numpy(canvas.seen[0]).long()).log_softmax(-1)
    distribution = (raw / PARAMS.temperature(0)).log_softmax(-1)
    tokens = torch.from_numpy(canvas.drawn[0]).long()[:, None]
    assert slots.commit_logp[:SLOTS] == pytest.approx(canvas.drawn_logp[0], abs=1e-6)
    assert slots.commit_logp_raw[:SLOTS][kept] == pytest.approx(raw.gather(1, tokens)[:, 0].numpy()[kept], abs=1e-4)
    assert slots.commit_entropy[:SLOTS] == pytest.approx(-(raw.exp() * raw).sum(-1).numpy(), abs=1e-4)
    assert slots.commit_law_entropy[:SLOTS] == pytest.approx(
        -(distribution.exp() * distribution).sum(-1).numpy(), abs=1e-4
    )
    (_, one), *_ = _drained(batch)[0].items()
    assert not one.commit_logp.any(), "what is committed was not drawn"
    assert one.commit_logp_raw.max() < 0


@pytest.mark.parametrize("num_canvases", [1, 2])
def test_a_resumed_completion_equals_the_uninterrupted_one(
    renoising_policy: RenoisingPolicy, num_canvases: int
) -> None:
    def finished(request: RenoisingRequest) -> Completion:
        batch = RenoisingSampler(renoising_policy, 0).open()
        batch.submit(request)
        return _drained(batch)[0][0]

    whole = finished(REQUESTS[0])
    names = Committed.__slots__
    first = Committed(**{name: getattr(whole, name)[: num_canvases * SLOTS] for name in names})
    rest = finished(replace(REQUESTS[0], committed=first))
    for name in names:
        assert np.array_equal(getattr(rest, name), getattr(whole, name)), name
    assert rest.num_forwards == whole.num_forwards


@pytest.mark.parametrize(
    ("num_slots", "token", "said"),
    [(7, 5, "committed has 7 slots"), (24, 5, "multiples of 8 below 24"), (8, 60, "committed has 60; the policy's")],
)
def test_invalid_committed_slots_are_refused(
    renoising_policy: RenoisingPolicy, num_slots: int, token: int, said: str
) -> None:
    columns: dict[str, Any] = dict.fromkeys(Committed.__slots__, np.zeros(num_slots, dtype=np.float32))
    columns["token_ids"] = np.full(num_slots, token, dtype=np.int32)
    with pytest.raises(ValueError, match=said):
        check_renoising_request(replace(REQUESTS[0], committed=Committed(**columns)), renoising_policy.config)


def test_requests_wait_for_a_free_row(renoising_policy: RenoisingPolicy) -> None:
    batch = RenoisingSampler(renoising_policy, 0).open(max_rows=2)
    for request in REQUESTS:
        batch.submit(request)
    batch.step()
    assert (batch.num_running, batch.num_waiting, [*batch.num_committed()]) == (2, 1, [0, 1])
    batch.cancel(0)
    batch.cancel(7)
    assert batch.num_running == 1
    batch.step()
    assert [*batch.num_committed()] == [1, 2]
    assert sorted(_drained(batch)[0]) == [1, 2]
    batch.submit(REQUESTS[0])
    batch.cancel(3)
    assert (batch.num_running, batch.num_waiting, batch.step()) == (0, 0, [])
