import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.sft.packing import first_fit_decreasing, pack, packed_padding_share, padding_share


def test_packing_is_first_fit_decreasing() -> None:
    assert first_fit_decreasing([2, 5, 4, 7, 1, 3, 8], 10) == [[6, 0], [3, 5], [1, 2, 4]]
    assert first_fit_decreasing([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_every_document_is_in_one_row_that_holds_it(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    fills = [sum(lengths[index] for index in row) for row in rows]
    assert max(fills) <= 20
    assert sum(fill <= 10 for fill in fills) <= 1, "two half-empty rows would be one"


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a document of 11 tokens does not fit into a row of 10"):
        first_fit_decreasing([3, 11], 10)


def test_packed_documents_are_at_their_recorded_places() -> None:
    ids = torch.arange(1, 41).view(5, 8)
    lengths = torch.tensor([8, 3, 2, 5, 1])
    packed = pack(ids, lengths, 9)
    assert packed.ids.shape == (3, 9)
    for document, length in enumerate(lengths.tolist()):
        row, start = int(packed.rows[document]), int(packed.starts[document])
        assert packed.ids[row, start : start + length].tolist() == ids[document, :length].tolist()
        assert packed.documents[row, start : start + length].tolist() == [document] * length
    assert (packed.documents >= 0).sum() == lengths.sum()


def test_padding_shares_are_counted() -> None:
    assert padding_share([4, 8, 4], 8) == pytest.approx(1 / 3)
    assert packed_padding_share([4, 8, 4], 3) == 0
    assert packed_padding_share([4, 8, 4], 2) == pytest.approx(1 - 16 / 20), "8 and 4 apart, then 4 alone"
