import torch

from learner.counter import uniform
from learner.seeds import fold, key_of


def test_tensor_draws_equal_the_scalar_hash() -> None:
    seeds = [0, 1, 5, 123_456_789_012_345, 2**62]
    drawn = uniform(torch.tensor(seeds), torch.tensor(7), 3)
    expected = [((fold(seed, 7, 3) >> 40) + 0.5) * 2.0**-23 for seed in seeds]
    assert drawn.tolist() == expected


def test_fold_is_associative_and_ordered() -> None:
    assert fold(fold(9, 4), 2) == fold(9, 4, 2)
    assert fold(9, 4, 2) != fold(9, 2, 4)


def test_draws_are_uniform_and_inside_the_open_interval() -> None:
    drawn = uniform(torch.tensor(9), torch.arange(400_000))
    counts = torch.histc(drawn, bins=50, min=0, max=1)
    chi_square = ((counts - 8000) ** 2 / 8000).sum().item()
    assert chi_square < 85.4, "49 degrees of freedom, p = 0.001"
    assert drawn.min() > 0
    assert drawn.max() < 1


def test_neighbouring_keys_are_uncorrelated() -> None:
    keys = torch.arange(200_000)
    pairs = torch.stack([uniform(torch.tensor(3), keys), uniform(torch.tensor(3), keys + 1)])
    assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.01
    pairs = torch.stack([uniform(keys, 5), uniform(keys + 1, 5)])
    assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.01


def test_names_have_stable_keys() -> None:
    assert key_of("countdown-1") == 0x1F8A52751096008D
    assert key_of("a") != key_of("b")
    assert 0 <= key_of("a") < 2**63
