"""Problems that are data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rewards.data.dataset import DataConfig, Dataset, problem_id, question_of
from rewards.data.prompts import user_turn
from rewards.data.rows import HubSplit, Row, rows_of
from rewards.problem import Problem, Split


def _pose(row: Row) -> Problem:
    question = row.text("question")
    return Problem(
        problem_id=problem_id("quiz", question),
        messages=user_turn(question),
        answer=row.text("answer"),
        demonstration=row.text("answer"),
    )


def _write(path: Path, numbers: Sequence[int]) -> Path:
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in numbers))
    return path


def _dataset(config: DataConfig) -> Dataset:
    hub = {split: HubSplit(repo="/nowhere", split=split) for split in (Split.TRAIN, Split.HELDOUT)}
    return Dataset("quiz", config, hub, _pose)


def test_each_split_has_its_file(tmp_path: Path) -> None:
    config = DataConfig(
        train_data=_write(tmp_path / "train.jsonl", range(5)), heldout_data=_write(tmp_path / "test.jsonl", [7, 8])
    )
    data = _dataset(config)
    assert (data.size(Split.TRAIN), data.size(Split.HELDOUT)) == (5, 2)
    assert {p.answer for p in data.problems(Split.HELDOUT, 2, seed=0)} == {"8", "9"}


def test_both_splits_are_cut_from_one_file(tmp_path: Path) -> None:
    path = _write(tmp_path / "all.jsonl", range(200))
    for config in (DataConfig(train_data=path), DataConfig(heldout_data=path)):
        data = _dataset(config)
        sizes = data.size(Split.TRAIN), data.size(Split.HELDOUT)
        assert sum(sizes) == 200
        assert 20 <= sizes[1] <= 60
        train = {p.problem_id for p in data.problems(Split.TRAIN, sizes[0], seed=0)}
        assert train.isdisjoint(p.problem_id for p in data.problems(Split.HELDOUT, sizes[1], seed=0))


@pytest.mark.parametrize("has_heldout_file", [False, True])
def test_validation_is_cut_from_the_training_problems(tmp_path: Path, has_heldout_file: bool) -> None:
    path = _write(tmp_path / "all.jsonl", range(200))
    heldout = _write(tmp_path / "test.jsonl", range(300, 310)) if has_heldout_file else None
    without = _dataset(DataConfig(train_data=path, heldout_data=heldout))
    data = _dataset(DataConfig(train_data=path, heldout_data=heldout, validation_fraction=0.2))
    sizes = {split: data.size(split) or 0 for split in Split}
    assert sizes[Split.HELDOUT] == without.size(Split.HELDOUT)
    assert sizes[Split.TRAIN] + sizes[Split.VALIDATION] == without.size(Split.TRAIN)
    assert 20 <= sizes[Split.VALIDATION] <= 60
    found = [p.problem_id for split in Split for p in data.problems(split, sizes[split], seed=0)]
    assert len(set(found)) == len(found) == sum(sizes.values())
    with pytest.raises(ValueError, match="the validation split of quiz is empty"):
        without.problems(Split.VALIDATION, 1, seed=0)


def test_the_hubs_sizes_are_known_without_fetching_unless_they_are_cut() -> None:
    hub = {split: HubSplit(repo="/nowhere", split=split, num_rows=9) for split in (Split.TRAIN, Split.HELDOUT)}
    whole, cut = (Dataset("quiz", DataConfig(validation_fraction=part), hub, _pose) for part in (0.0, 0.2))
    assert (whole.size(Split.TRAIN), whole.size(Split.HELDOUT)) == (9, 9)
    assert (cut.size(Split.TRAIN), cut.size(Split.VALIDATION), cut.size(Split.HELDOUT)) == (None, None, 9)


def test_what_the_hub_also_holds_out_is_not_trained_on(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", [1, 2, 3, 4])
    _write(tmp_path / "test.jsonl", [3, 5])
    hub = {
        Split.TRAIN: HubSplit(repo=str(tmp_path), split="train", num_rows=3),
        Split.HELDOUT: HubSplit(repo=str(tmp_path), split="test", num_rows=2),
    }
    data = Dataset("quiz", DataConfig(), hub, _pose)
    assert {p.answer for p in data.problems(Split.TRAIN, 3, seed=0)} == {"2", "3", "5"}
    assert data.at_most(Split.TRAIN) == data.size(Split.TRAIN) == 3
    assert data.at_most(Split.HELDOUT) == 2


def test_problems_that_ask_the_same_and_test_otherwise_are_two_and_in_one_split() -> None:
    first, second = (problem_id("quiz", "Sort.", test) for test in ("assert f(1)", "assert f(2)"))
    assert first != second
    assert question_of(first) == question_of(second) == problem_id("quiz", "Sort.")


def test_fewer_problems_are_a_prefix_of_more_and_seeds_shuffle(tmp_path: Path) -> None:
    data = _dataset(DataConfig(train_data=_write(tmp_path / "all.jsonl", range(100))))
    assert data.problems(Split.TRAIN, 50, seed=3)[:20] == data.problems(Split.TRAIN, 20, seed=3)
    assert data.problems(Split.TRAIN, 20, seed=3) != data.problems(Split.TRAIN, 20, seed=4)


def test_too_few_problems_are_said(tmp_path: Path) -> None:
    data = _dataset(
        DataConfig(train_data=_write(tmp_path / "a.jsonl", [1]), heldout_data=_write(tmp_path / "b.jsonl", [2]))
    )
    with pytest.raises(ValueError, match="the train split of quiz has 1 problems with this config, but 2 were asked"):
        data.problems(Split.TRAIN, 2, seed=0)


def test_a_duplicate_is_named_with_both_places(tmp_path: Path) -> None:
    path = _write(tmp_path / "all.jsonl", [1, 2, 1])
    with pytest.raises(ValueError, match=r"all\.jsonl, line 3 has the problem of .*all\.jsonl, line 1 again"):
        _dataset(DataConfig(train_data=path)).problems(Split.TRAIN, 1, seed=0)


def test_an_empty_split_is_said(tmp_path: Path) -> None:
    path = _write(tmp_path / "all.jsonl", [1])
    data = _dataset(DataConfig(train_data=path))
    empty = next(split for split in Split if not data.size(split))
    with pytest.raises(ValueError, match=f"the {empty} split of quiz is empty: .*all.jsonl has no problem for it"):
        data.problems(empty, 1, seed=0)


def test_rows_come_from_every_kind_of_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"question": 'a,\n"b"', "answer": "1"}, {"question": "\u00e4", "answer": "2"}]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    (tmp_path / "x.csv").write_text('question,answer\n"a,\n""b""",1\n\u00e4,2\n')
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    for name in ("x.json", "x.jsonl", "x.jsonl.gz", "x.csv", "x.parquet"):
        assert [dict(row.fields) for row in rows_of(tmp_path / name)] == rows, name


def test_rows_come_from_what_datasets_loads(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", [1, 2])
    rows = rows_of(HubSplit(repo=str(tmp_path), split="train"))
    assert [row.fields["answer"] for row in rows] == ["2", "3"]
    assert rows[1].place == f"{tmp_path}, split train, row 2"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.jsonl", b'{"question": "a"}\n{', r"x\.jsonl, line 2 is not JSON"),
        ("x.jsonl", b"[1]\n", r"x\.jsonl, line 1 is \[1\]; it should be an object"),
        ("x.jsonl", b"\n", r"x\.jsonl has no rows"),
        ("x.jsonl", b'{}\n{"\xff', r"x.jsonl, line 2: byte 3 is not UTF-8"),
        ("x.jsonl", b"9" * 5000, r"x\.jsonl, line 1 is not JSON that can be read"),
        ("x.json", b"{}", r"x\.json is \{\}; it should be a list"),
        ("x.txt", b"", r"x\.txt is of no kind that can be read; it should be \*\.jsonl"),
        ("x.csv.gz", b"a,b\n", r"x\.csv\.gz is not gzip"),
        ("x.csv.gz", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 30, r"x\.csv\.gz is not gzip"),
        ("x.csv", b"a\n" + b"9" * 200_000, r"x\.csv is not CSV that can be read: field larger than"),
        ("x.csv", b"a,b\n1,2,3\n", r"x\.csv, row 1 has more cells than the 2 columns of the first line"),
        ("x.parquet", b"PAR", r"x\.parquet is not Parquet"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as refusal:
        rows_of(tmp_path / name)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_and_an_unreachable_dataset_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: no such file"):
        rows_of(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*; a local file can take its place"):
        rows_of(HubSplit(repo=str(tmp_path / "nothing"), split="train"))


def test_a_missing_column_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "reply": ""}\n')
    row = rows_of(path)[1]
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2 has no column answer; its columns are question, reply"):
        row.text("answer")
    with pytest.raises(ValueError, match=r'line 2: reply is ""; it should be a text that says something'):
        row.text("reply")
