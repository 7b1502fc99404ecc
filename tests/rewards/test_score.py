import pytest

from rewards.score import Score


@pytest.mark.parametrize(
    ("correct", "problems", "low", "high"),
    [(0, 100, 0.0, 0.0370), (50, 100, 0.4038, 0.5962), (100, 100, 0.9630, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_is_wilsons(correct: int, problems: int, low: float, high: float) -> None:
    """The last case is a worked example of Newcombe (Statistics in Medicine 1998), method 3."""
    score = Score(num_correct=correct, num_problems=problems)
    assert score.interval == pytest.approx((low, high), abs=5e-4)
