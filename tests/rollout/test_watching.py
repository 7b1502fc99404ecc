"""Stepping a batch by hand: progress reports, cancellation, and resumption from committed blocks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.request import Committed, Completion, Progress, Request, SamplingParams
from rollout.sampler import Sampler, SlotBatch

BASE: dict[str, Any] = {"gen_length": 24, "block_length": 8, "num_denoise_steps": 12, "stop_ids": ()}
SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.9},
    "threshold": {"temperature": 0.9, "threshold": 0.3},
    "random": {"temperature": 0.9, "schedule": "random"},
    "sample then select": {"temperature": 0.9, "drawing": "sample_then_select"},
    "guidance": {"temperature": 0.9, "cfg_scale": 1.5},
    "cached": {"temperature": 0.9, "cache": "dual"},
}


def _request(index: int = 0, **changes: Any) -> Request:
    ids = torch.randint(0, 38, (5 + index,), generator=torch.Generator().manual_seed(index)).tolist()
    return Request(prompt_ids=tuple(ids), params=SamplingParams(**BASE | changes), seed=100 + index)


def _run(batch: SlotBatch) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    for _ in range(100):
        done |= dict(batch.step())
        if not batch.num_running and not batch.num_waiting:
            return done
    raise AssertionError("it never ends")


def _assert_same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.step_map.tolist() == other.step_map.tolist()
    assert one.fallback.tolist() == other.fallback.tolist()
    assert (one.num_forwards, one.num_tokens, one.finish_reason) == (
        other.num_forwards,
        other.num_tokens,
        other.finish_reason,
    )
    for name in ("commit_logp", "commit_logp_raw", "commit_entropy", "commit_law_entropy"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=2e-5)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_completion_resumed_at_a_block_equals_the_uninterrupted_one(
    policy: Transformer, changes: dict[str, Any], num_blocks: int
) -> None:
    request = _request(**changes)
    whole = Sampler(policy, 1).generate([request])[0]
    batch = Sampler(policy, 1).open([request])
    while batch.num_committed().get(0, 0) < 8 * num_blocks:
        batch.step()
    committed = batch.progress([0])[0].committed
    assert len(committed) == 8 * num_blocks
    # Resumed between other requests, in another batch, on another sampler.
    rest = Sampler(policy, 1).generate([_request(1), replace(request, committed=committed), _request(2)])
    _assert_same(rest[1], whole)
    assert whole.step_map.max() > committed.step_map.max()


def test_a_completion_with_fixed_tokens_can_be_resumed(policy: Transformer) -> None:
    request = replace(_request(temperature=0.9), fixed_tokens=dict.fromkeys([*range(8), 9, 20], 7))
    whole = Sampler(policy, 1).generate([request])[0]
    batch = Sampler(policy, 1).open([request])
    batch.step()
    committed = batch.progress([0])[0].committed
    assert (len(committed), committed.num_steps) == (8, 0)
    _assert_same(Sampler(policy, 1).generate([replace(request, committed=committed)])[0], whole)
    while batch.num_committed().get(0, 0) < 16:
        batch.step()
    committed = batch.progress([0])[0].committed
    _assert_same(Sampler(policy, 1).generate([replace(request, committed=committed)])[0], whole)


def test_a_request_that_already_ended_runs_no_forward(policy: Transformer) -> None:
    request = _request(temperature=3.0, stop_ids=tuple(range(30)))
    whole = Sampler(policy, 1).generate([request])[0]
    assert len(whole.token_ids) == 8
    columns = {name: getattr(whole, name) for name in Committed.__dataclass_fields__}
    sampler = Sampler(policy, 1)
    _assert_same(sampler.generate([replace(request, committed=Committed(**columns))])[0], whole)
    assert sampler.counts.num_forwards == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": np.zeros(7, np.int32)}, "committed has 7 slots; whole blocks are multiples of 8"),
        ({"token_ids": np.zeros(32, np.int32)}, "committed has 32 slots"),
        ({"fallback": np.zeros(9, bool)}, "committed has columns of unequal length"),
        ({"token_ids": np.full(8, 1000, np.int32)}, "committed has 1000"),
        ({"token_ids": np.full(8, -1, np.int32)}, "committed has -1"),
    ],
)
def test_invalid_committed_slots_are_refused(policy: Transformer, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampler(policy, 1).open([replace(_request(), committed=_committed(**change))])


def test_a_committed_mask_id_is_refused(policy: Transformer) -> None:
    mask_id = policy.config.mask_token_id
    request = replace(_request(), committed=_committed(token_ids=np.full(8, mask_id, np.int32)))
    with pytest.raises(ValueError, match=f"committed has the mask id {mask_id}"):
        Sampler(policy, 1).open([request])


def _committed(**changes: Any) -> Committed:
    length = len(changes.get("token_ids", range(8)))
    floats = np.zeros(length, np.float32)
    columns = {
        "token_ids": np.zeros(length, np.int32),
        "step_map": np.zeros(length, np.int32),
        "commit_logp": floats,
        "commit_logp_raw": floats,
        "commit_entropy": floats,
        "commit_law_entropy": floats,
        "fallback": np.zeros(length, bool),
    }
    return Committed(**columns | changes)


def test_progress_shows_the_canvas_and_is_not_changed_later(policy: Transformer) -> None:
    request = _request(temperature=0.9)
    batch = Sampler(policy, 1).open([request])
    assert batch.progress([0]) == {}
    seen: list[Progress] = []
    done: dict[int, Completion] = {}
    while not done:
        done = dict(batch.step())
        seen += batch.progress([0]).values()
    assert [progress.num_steps for progress in seen] == list(range(1, 12))
    assert [progress.num_committed for progress in seen] == [0] * 3 + [8] * 4 + [16] * 4
    for progress in seen:
        assert (~progress.masked).sum() == 2 * progress.num_steps
        assert not progress.masked[: progress.num_committed].any()
        is_set = ~progress.masked
        assert (progress.slots.token_ids[is_set] == done[0].token_ids[is_set]).all()
        assert (progress.slots.step_map[is_set] == done[0].step_map[is_set]).all()
        assert (progress.slots.commit_logp_raw[is_set] == done[0].commit_logp_raw[is_set]).all()
        assert (progress.slots.token_ids[progress.masked] == policy.config.mask_token_id).all()
    assert batch.progress([0]) == {}


def test_progress_fetches_only_the_given_rows(policy: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Sampler(policy, 1).open([_request(0), _request(1)])
    batch.step()
    fetched: list[list[int]] = []
    progress = batch.state.progress
    monkeypatch.setattr(
        batch.state, "progress", lambda slots, *rest: fetched.append(list(slots)) or progress(slots, *rest)
    )
    assert batch.progress([]) == {}
    assert list(batch.progress([1, 5])) == [1]
    assert fetched == [[1]]


def test_a_cancelled_requests_slot_is_reused_at_the_next_step(policy: Transformer) -> None:
    sampler = Sampler(policy, 1, EngineConfig(num_slots=2))
    requests = [_request(index, temperature=0.9) for index in range(4)]
    expected = Sampler(policy, 1).generate(requests)
    batch = sampler.open(requests)
    batch.step()
    assert (batch.num_running, batch.num_waiting) == (2, 2)
    batch.cancel(0)
    batch.cancel(2)
    batch.cancel(99)
    assert (batch.num_running, batch.num_waiting) == (1, 1)
    batch.step()
    assert (batch.num_running, batch.num_waiting) == (2, 0)
    done = _run(batch)
    assert sorted(done) == [1, 3]
    for index, completion in done.items():
        _assert_same(completion, expected[index])
    batch.cancel(1)


@pytest.mark.parametrize("fixed", [{}, {3: 7}], ids=["alike", "with a given token"])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_successor_does_not_share_its_predecessors_forward(
    policy: Transformer, is_static: bool, fixed: dict[int, int]
) -> None:
    """Rows with equal canvases share a forward. When one of them leaves, its successor in the slot must not
    share it."""
    one, other = (replace(_request(1), prompt_ids=ids) for ids in ((1, 2, 3, 4), (9, 8, 7, 6)))
    requests = [one, one, replace(other, fixed_tokens=fixed)]
    expected = Sampler(policy, 1).generate(requests)
    batch = Sampler(policy, 1, EngineConfig(num_slots=2, static_shapes=is_static)).open(requests)
    batch.step()
    batch.cancel(0)
    done = _run(batch)
    assert sorted(done) == [1, 2]
    for index, completion in done.items():
        _assert_same(completion, expected[index])
