from dataclasses import replace

import pytest
import torch

from learner.batch import CompletionBatch, GroupedBatch, RolloutBatch, join_canvas, pad_rows


def test_canvas_joins_prompt_and_completion_without_a_gap() -> None:
    rows = pad_rows([[1, 2], [3, 4, 5]], fill=0)
    batch = CompletionBatch(
        prompt_ids=rows,
        prompt_lengths=torch.tensor([2, 3]),
        completion_ids=torch.tensor([[7, 8], [7, 8]]),
        completion_lengths=torch.tensor([2, 2]),
        sample_keys=torch.tensor([0, 1]),
    )
    ids, columns = join_canvas(batch, batch.prompt_ids, batch.completion_ids, pad_id=9)
    assert ids.tolist() == [[1, 2, 7, 8, 9], [3, 4, 5, 7, 8]]
    assert columns.tolist() == [[2, 3], [3, 4]]


@pytest.mark.parametrize("count", [1, 2, 5, 12, 40])
def test_minibatches_partition_the_rows_evenly(grouped: GroupedBatch, count: int) -> None:
    parts = grouped.minibatches(count, whole_groups=False)
    assert torch.cat(parts).tolist() == list(range(12))
    assert len(parts) == min(count, 12)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    whole = grouped.minibatches(count, whole_groups=True)
    assert torch.cat(whole).tolist() == list(range(12))
    assert len(whole) == min(count, 3)
    assert sum(len(grouped.group_index[rows].unique()) for rows in whole) == 3


def test_rows_have_the_index_and_size_of_their_group(grouped: GroupedBatch) -> None:
    assert grouped.group_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert grouped.group_places.tolist() == [0, 1, 2, 3] * 3
    assert grouped.group_keys.tolist() == [key for first in (0, 4, 8) for key in [first * 7919] * 4]
    assert grouped.group_sizes.tolist() == [4] * 12


def test_speed_is_text_tokens_per_forward(rollouts: RolloutBatch) -> None:
    batch = replace(rollouts, num_forwards=torch.arange(12))
    lengths = batch.completion_lengths.tolist()
    expected = [length / max(1, count) for count, length in enumerate(lengths)]
    assert batch.speeds().tolist() == pytest.approx(expected)
