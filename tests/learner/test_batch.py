import pytest
import torch

from learner.batch import RolloutBatch, canvas, pad_rows


def test_canvas_joins_prompt_and_completion_without_a_gap() -> None:
    rows = pad_rows([[1, 2], [3, 4, 5]], fill=0)
    batch = _batch(rows, torch.tensor([2, 3]))
    ids, columns = canvas(batch, batch.prompt_ids, batch.completion_ids, pad_id=9)
    assert ids.tolist() == [[1, 2, 7, 8, 9], [3, 4, 5, 7, 8]]
    assert columns.tolist() == [[2, 3], [3, 4]]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_shards_are_equal_in_size_and_hold_every_row_once(rollouts: RolloutBatch, world_size: int) -> None:
    shards = [rollouts.shard(rank, world_size) for rank in range(world_size)]
    assert len({shard.num_rows for shard in shards}) == 1
    kept = [key for shard in shards for key in shard.sample_keys[shard.completion_lengths > 0].tolist()]
    assert kept == rollouts.sample_keys.tolist()


def _batch(prompts: torch.Tensor, lengths: torch.Tensor) -> RolloutBatch:
    ones = torch.ones(len(prompts), dtype=torch.long)
    return RolloutBatch(
        prompt_ids=prompts,
        prompt_lengths=lengths,
        completion_ids=torch.tensor([[7, 8]]).expand(len(prompts), -1),
        completion_lengths=2 * ones,
        sample_keys=ones,
        rewards=ones.float(),
        group_ids=ones,
        step_map=ones[:, None].expand(-1, 2),
        commit_logp=ones[:, None].expand(-1, 2).float(),
        policy_versions=ones,
    )
