"""Tests of tasks whose problems come from a dataset."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from rewards.data.dataset import DataConfig, Dataset, problem_id, question_of
from rewards.data.prompts import user_turn
from rewards.data.rows import Row
from rewards.data.sources import HubSplit, rows_of
from rewards.problem import Problem, Split


def _pose(row: Row) -> Problem:
    question = row.text("question")
    return Problem(
        problem_id=problem_id("quiz", question),
        messages=user_turn(question),
        answer=row.text("answer"),
        reference_completion=row.text("answer"),
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


def test_one_file_is_divided_into_both_splits(tmp_path: Path) -> None:
    path = _write(tmp_path / "all.jsonl", range(200))
    for config in (DataConfig(train_data=path), DataConfig(heldout_data=path)):
        data = _dataset(config)
        sizes = data.size(Split.TRAIN), data.size(Split.HELDOUT)
        assert sum(sizes) == 200
        assert 20 <= sizes[1] <= 60
        train = {p.problem_id for p in data.problems(Split.TRAIN, sizes[0], seed=0)}
        assert train.isdisjoint(p.problem_id for p in data.problems(Split.HELDOUT, sizes[1], seed=0))


@pytest.mark.parametrize("has_heldout_file", [False, True])
def test_validation_is_taken_from_the_training_problems(tmp_path: Path, has_heldout_file: bool) -> None:
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


def test_hub_sizes_are_known_without_fetching_unless_split() -> None:
    hub = {split: HubSplit(repo="/nowhere", split=split, num_rows=9) for split in (Split.TRAIN, Split.HELDOUT)}
    whole, cut = (Dataset("quiz", DataConfig(validation_fraction=part), hub, _pose) for part in (0.0, 0.2))
    assert (whole.size(Split.TRAIN), whole.size(Split.HELDOUT)) == (9, 9)
    assert (cut.size(Split.TRAIN), cut.size(Split.VALIDATION), cut.size(Split.HELDOUT)) == (None, None, 9)


def test_held_out_problems_of_the_hub_are_removed_from_training(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", [1, 2, 3, 4])
    _write(tmp_path / "test.jsonl", [3, 5])
    hub = {
        Split.TRAIN: HubSplit(repo=str(tmp_path), split="train", num_rows=3),
        Split.HELDOUT: HubSplit(repo=str(tmp_path), split="test", num_rows=2),
    }
    data = Dataset("quiz", DataConfig(), hub, _pose)
    assert {p.answer for p in data.problems(Split.TRAIN, 3, seed=0)} == {"2", "3", "5"}
    assert data.max_size(Split.TRAIN) == data.size(Split.TRAIN) == 3
    assert data.max_size(Split.HELDOUT) == 2


def test_equal_questions_with_other_tests_are_in_one_split() -> None:
    first, second = (problem_id("quiz", "Sort.", test) for test in ("assert f(1)", "assert f(2)"))
    assert first != second
    assert question_of(first) == question_of(second) == problem_id("quiz", "Sort.")


def test_fewer_problems_are_a_prefix_of_more_and_seeds_shuffle(tmp_path: Path) -> None:
    data = _dataset(DataConfig(train_data=_write(tmp_path / "all.jsonl", range(100))))
    assert data.problems(Split.TRAIN, 50, seed=3)[:20] == data.problems(Split.TRAIN, 20, seed=3)
    assert data.problems(Split.TRAIN, 20, seed=3) != data.problems(Split.TRAIN, 20, seed=4)


def test_too_few_problems_raise(tmp_path: Path) -> None:
    data = _dataset(
        DataConfig(train_data=_write(tmp_path / "a.jsonl", [1]), heldout_data=_write(tmp_path / "b.jsonl", [2]))
    )
    with pytest.raises(ValueError, match="the train split of quiz has 1 problems with this config, but 2 were asked"):
        data.problems(Split.TRAIN, 2, seed=0)


def test_duplicate_problems_are_dropped_with_one_warning(tmp_path: Path) -> None:
    path = _write(tmp_path / "all.jsonl", [1, 2, 1, 2, 1])
    whole = _write(tmp_path / "test.jsonl", [3])
    data = _dataset(DataConfig(train_data=path, heldout_data=whole))
    assert data.warnings == []
    assert data.size(Split.TRAIN) == data.max_size(Split.TRAIN) == len(data.problems(Split.TRAIN, 2, seed=0)) == 2
    assert data.size(Split.HELDOUT) == 1
    sentence = f"{path}: 3 of 5 rows repeat an earlier problem and are left out, first line 3 (as line 1)"
    assert data.warnings == [sentence]


def test_equal_questions_with_other_answers_are_counted_separately(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text("".join(f'{{"question": "a", "answer": "{n}"}}\n' for n in (1, 1, 2, 2)))
    data = _dataset(DataConfig(train_data=path, heldout_data=_write(tmp_path / "test.jsonl", [3])))
    (problem,) = data.problems(Split.TRAIN, 1, seed=0)
    assert problem.answer == "1"
    (remark,) = data.warnings
    assert remark.endswith("first line 2 (as line 1); 2 of them differ in the answer, first line 3 (as line 1)")


def test_duplicates_change_neither_splits_nor_order(tmp_path: Path) -> None:
    numbers = list(range(60))
    once, twice = (
        _dataset(DataConfig(train_data=_write(tmp_path / f"{len(n)}.jsonl", n))) for n in (numbers, numbers * 2)
    )
    for split in (Split.TRAIN, Split.HELDOUT):
        size = once.size(split)
        assert size is not None
        assert once.problems(split, size, seed=3) == twice.problems(split, size, seed=3)
    assert len(twice.warnings) == 1


def test_an_empty_split_raises(tmp_path: Path) -> None:
    path = _write(tmp_path / "all.jsonl", [1])
    data = _dataset(DataConfig(train_data=path))
    empty = next(split for split in Split if not data.size(split))
    with pytest.raises(ValueError, match=f"the {empty} split of quiz is empty: .*all.jsonl has no problem for it"):
        data.problems(empty, 1, seed=0)


def test_rows_are_read_from_every_file_format(tmp_path: Path) -> None:
    rows = [{"question": 'a,\n"b"', "answer": "1"}, {"question": "\u00e4", "answer": "2"}]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    (tmp_path / "x.csv").write_text('question,answer\n"a,\n""b""",1\n\u00e4,2\n')
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    for name in ("x.json", "x.jsonl", "x.jsonl.gz", "x.csv", "x.parquet"):
        assert [dict(row.fields) for row in rows_of(tmp_path / name)] == rows, name


def test_rows_are_read_through_datasets(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", [1, 2])
    rows = list(rows_of(HubSplit(repo=str(tmp_path), split="train")))
    assert [row.fields["answer"] for row in rows] == ["2", "3"]
    assert rows[1].place == f"{tmp_path / 'train.jsonl'}, line 2"


def test_a_directory_may_have_splits_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for name, number in (("train-00000-of-00002", 1), ("train-00001-of-00002", 2), ("test-00000-of-00001", 3)):
        rows = pa.Table.from_pylist([{"question": f"{number}?", "answer": str(number)}])
        parquet.write_table(rows, folder / "data" / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    data = _dataset(DataConfig(train_data=Path("set"), heldout_data=Path("set:test")))
    assert {problem.answer for problem in data.problems(Split.TRAIN, 2, seed=0)} == {"1", "2"}
    assert data.problems(Split.HELDOUT, 1, seed=0)[0].answer == "3"
    places = [row.place.removeprefix(f"{folder}/data/") for row in rows_of(Path("set"))]
    assert places == ["train-00000-of-00002.parquet, row 1", "train-00001-of-00002.parquet, row 1"]
    with pytest.raises(ValueError, match=r"^the dataset set, split dev cannot be .*; its splits are train, test$"):
        rows_of(Path("set:dev"))


def test_files_of_a_directory_are_read_like_single_files(tmp_path: Path) -> None:
    rows = [{"answer": "007"}, {"answer": 7}, {"answer": "2024-01-01"}, {"answer": ["x"], "other": 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows[3]).encode())
    assert [dict(row.fields) for row in rows_of(tmp_path)] == rows
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'b.jsonl'}, line 1 is not JSON"):
        list(rows_of(tmp_path))


def test_directories_saved_by_datasets_are_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"question": "a", "answer": "1"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several", "several:train"):
        assert [dict(row.fields) for row in rows_of(tmp_path / name)] == [{"question": "a", "answer": "1"}], name
    with pytest.raises(ValueError, match=r"it has no split test; its splits are train$"):
        rows_of(Path(f"{tmp_path / 'several'}:test"))


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:test", ("org/name", None, "test")),
        ("org/name-1.5/main", ("org/name-1.5", "main", "train")),
        ("org/name/main:train[:10%]", ("org/name", "main", "train[:10%]")),
    ],
)
def test_a_path_that_does_not_exist_is_a_hub_dataset(
    named: str, asked: tuple[str, str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def load(repo: str, config: str | None, split: str) -> list[dict[str, str]]:
        given.append((repo, config, split))
        return [{"question": "a", "answer": "1"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = _dataset(DataConfig(train_data=Path(named), heldout_data=Path(named)))
    # A user's data set must be read to know its size.
    assert data.size(Split.TRAIN) == 1
    assert set(given) == {asked}


def test_hub_errors_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"^the dataset org/name/main, split test cannot be loaded: .*HF_HUB_OFFLINE"
    ) as refusal:
        rows_of(Path("org/name/main:test"))
    assert str(refusal.value).endswith("; and there is no file or directory org/name here")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- {config_name: a, data_files: a.jsonl}\n- {config_name: b, data_files: a.jsonl}\n---\n"
    )
    _write(tmp_path / "a.jsonl", [1])
    with pytest.raises(ValueError, match="it has the configs 'a', 'b', and one is needed"):
        rows_of(tmp_path)


def test_paths_become_absolute_and_hub_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    found = DataConfig(train_data=Path("x.jsonl"), heldout_data=Path("folder:test")).with_absolute_paths()
    assert (found.train_data, found.heldout_data) == (tmp_path / "x.jsonl", tmp_path / "folder:test")
    found = DataConfig(train_data=Path("org/name/main:test")).with_absolute_paths()
    assert (found.train_data, found.heldout_data) == (Path("org/name/main:test"), None)


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
def test_unusable_files_are_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as refusal:
        list(rows_of(tmp_path / name))
    assert "\n" not in str(refusal.value)


def test_missing_files_and_datasets_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: no such file"):
        rows_of(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*; a local file can take its place"):
        rows_of(HubSplit(repo=str(tmp_path / "nothing"), split="train"))


def test_a_missing_column_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "reply": ""}\n')
    row = list(rows_of(path))[1]
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2 has no column answer; its columns are question, reply"):
        row.text("answer")
    with pytest.raises(ValueError, match=r'line 2: reply is ""; it should be a text that says something'):
        row.text("reply")
