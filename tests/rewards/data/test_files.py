"""Tests of reading row files as written by editors, spreadsheets and other programs."""

from __future__ import annotations

import gzip
import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rewards.data.files import file_rows

ROWS = [{"prompt": "Wie heißt er?", "answer": "7"}]
LINE = json.dumps(ROWS[0], ensure_ascii=False)
CSV = "prompt,answer\r\nWie heißt er?,7\r\n"


def _rows(tmp_path: Path, name: str, content: str | bytes) -> list[dict[str, Any]]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [dict(row.fields) for row in file_rows(path)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", BOM_UTF8 + CSV.encode()),
        ("X.CSV", BOM_UTF8 + CSV.encode()),
        ("x.csv.gz", gzip.compress(BOM_UTF8 + CSV.encode(), mtime=0)),
        ("X.CSV.GZ", gzip.compress(CSV.encode(), mtime=0)),
        ("x.jsonl", BOM_UTF8 + f"{LINE}\r\n".encode()),
        ("x.jsonl.gz", gzip.compress(BOM_UTF8 + LINE.encode(), mtime=0)),
        ("x.jsonl", gzip.compress(LINE.encode(), mtime=0)),
        ("x.json", BOM_UTF8 + BOM_UTF8 + f"[{LINE}]".encode()),
        ("x.csv", '"\ufeffprompt",answer\nWie heißt er?,7\n'.encode()),
        ("x.ndjson", BOM_UTF8 + LINE.encode()),
        ("x.json", BOM_UTF8 + f"[{LINE}]".encode()),
        ("x.csv", CSV.encode("utf-16")),
        ("x.csv", BOM_UTF16_BE + CSV.encode("utf-16-be")),
        ("x.csv", CSV.encode("utf-32")),
        ("x.csv", CSV.replace(",", "\t").encode("utf-16")),
        ("x.jsonl", f"{LINE}\r\n".encode("utf-16")),
        ("x.json", f"[{LINE}]".encode("utf-16")),
    ],
)
def test_byte_order_marks_select_the_encoding(tmp_path: Path, name: str, content: bytes) -> None:
    assert _rows(tmp_path, name, content) == ROWS


def test_byte_order_marks_within_joined_files_are_skipped(tmp_path: Path) -> None:
    line = BOM_UTF8 + LINE.encode() + b"\n"
    assert _rows(tmp_path, "x.jsonl", line + line) == [*ROWS, *ROWS]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("prompt;answer\r\nWhat, now?;3,5\r\n", [{"prompt": "What, now?", "answer": "3,5"}]),
        ("prompt\tanswer\nWhat, now?\t7\n", [{"prompt": "What, now?", "answer": "7"}]),
        ('prompt;answer\n"What; now?";7\n', [{"prompt": "What; now?", "answer": "7"}]),
        ('"prompt", "answer"\n"What, now?", "7"\n', [{"prompt": "What, now?", "answer": "7"}]),
        (" prompt , answer \nWhat?, 7\n", [{"prompt": "What?", "answer": "7"}]),
        ('prompt,answer\r\n"a\r\n""b""",7\r\n\r\n\r\n', [{"prompt": 'a\r\n"b"', "answer": "7"}]),
        ("prompt,answer\r\na,7\r\n,\r\n , \r\n", [{"prompt": "a", "answer": "7"}]),
        ("\r\n\r\nprompt,answer\r\na,7\r\n", [{"prompt": "a", "answer": "7"}]),
        ("prompt,answer\ra,7\r", [{"prompt": "a", "answer": "7"}]),
        ("prompt,answer\na\n", [{"prompt": "a", "answer": None}]),
        (",prompt\n0,a\n", [{"": "0", "prompt": "a"}]),
        ("prompt\nWhat?\n", [{"prompt": "What?"}]),
        ("sep=;\r\nprompt;answer\r\nWhat, now?;7\r\n", [{"prompt": "What, now?", "answer": "7"}]),
        ("SEP=,\nprompt,answer\na;b,7\n", [{"prompt": "a;b", "answer": "7"}]),
        ('"sep=|"\nprompt|answer\na|7\n', [{"prompt": "a", "answer": "7"}]),
        ('#TYPE System.Object\r\n"prompt","answer"\r\n"a","7"\r\n', [{"prompt": "a", "answer": "7"}]),
    ],
)
def test_csv_of_spreadsheets_is_read(tmp_path: Path, content: str, rows: list[dict[str, str]]) -> None:
    assert _rows(tmp_path, "x.csv", content) == rows


def test_row_numbers_count_empty_rows(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,answer\na,1\n,\nb,2\n")
    assert [row.place for row in file_rows(tmp_path / "x.csv")] == [f"{tmp_path}/x.csv, row {n}" for n in (1, 3)]


def test_a_json_file_may_contain_json_lines(tmp_path: Path) -> None:
    assert _rows(tmp_path, "x.json", f"{LINE}\n{LINE}\n") == [*ROWS, *ROWS]
    assert _rows(tmp_path, "y.json", json.dumps(ROWS, indent=2)) == ROWS


def test_parquet_structs_lists_and_maps_are_read(tmp_path: Path) -> None:
    schema = pa.schema(
        [("prompt", pa.list_(pa.struct([("role", pa.string())]))), ("truth", pa.map_(pa.string(), pa.string()))]
    )
    row = {"prompt": [{"role": "user"}], "truth": [("ground_truth", "7")]}
    parquet.write_table(pa.Table.from_pylist([row] * 3000, schema=schema), tmp_path / "x.parquet")
    rows = list(file_rows(tmp_path / "x.parquet"))
    assert dict(rows[-1].fields) == {"prompt": [{"role": "user"}], "truth": {"ground_truth": "7"}}
    assert rows[-1].place == f"{tmp_path / 'x.parquet'}, row 3000"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.jsonl", LINE.encode("utf-16-le"), "x.jsonl, line 1 has a NUL character, as UTF-16 without its mark has"),
        ("x.csv", BOM_UTF16_LE + b"abc", "x.csv, its byte order mark says UTF-16-LE, and it is not; save it as UTF-8"),
        ("x.csv", BOM_UTF8 + b"a,b\n\xe4", "x.csv, line 2: byte 1 is not UTF-8; save the file as UTF-8"),
        ("x.csv", "a,b\n1,2,3\n", "x.csv, row 1 has more cells than the 2 columns of the first line; put a text with"),
        ("x.csv", "a,b,a\n1,2,3\n", "x.csv has the column a twice"),
        ("x.csv", 'a,b\n"1,2\n3,4\n', "x.csv is not CSV that can be read: unexpected end of data"),
        ("x.json", '{"data": []}', 'x.json is {"data": []}; it should be a list of objects'),
        ("x.json", f"{LINE}\n{{", "x.json, line 2 is not JSON"),
        ("x.parquet", b"", "x.parquet is not Parquet that can be read"),
        ("x.xlsx", b"\xd0\xcf", "x.xlsx is of no kind that can be read; it should be *.jsonl, *.json, *.csv"),
        ("x.csv", b"PK\x03\x04\0", "x.csv is a workbook of Excel or a zip archive; save it as CSV UTF-8"),
        ("x.parquet", "version https://git-lfs.github.com/spec/v1\n", "x.parquet is what Git LFS has in place of the"),
    ],
)
def test_read_errors_name_the_place(tmp_path: Path, name: str, content: str | bytes, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - compared below, without escapes
        _rows(tmp_path, name, content)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_float32_values_are_read_as_written(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": pa.array([0.1, None, -7, 1e-7], pa.float32())}), tmp_path / "x.parquet")
    assert [row.fields["a"] for row in file_rows(tmp_path / "x.parquet")] == [0.1, None, -7, 1e-7]


def test_duplicate_parquet_columns_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet has the column a twice; each should be there once$"):
        list(file_rows(tmp_path / "x.parquet"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet", "x.jsonl.gz", "x"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} cannot be read: no such file or directory$"):
        list(file_rows(tmp_path / name))
