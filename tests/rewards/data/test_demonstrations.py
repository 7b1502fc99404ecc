"""Tests of demonstration files: parsing, and one-line errors that name the bad line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from rewards import Message
from rewards.data.demonstrations import read_demonstrations
from rewards.data.prompts import D1_FORMAT

USER, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}


def _file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_last_message_is_the_trained_completion(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    turns = [system, USER, ANSWER, {"role": "user", "content": "And 1 more?"}, {"role": "assistant", "content": "6"}]
    (read,) = read_demonstrations(_file(tmp_path, {"messages": turns, "id": 3}))
    assert read.messages == tuple(Message(**turn) for turn in turns[:-1])
    assert read.completion == "6"


def test_prompt_and_completion_are_a_one_turn_conversation(tmp_path: Path) -> None:
    path = _file(tmp_path, {"prompt": "2 + 3?", "completion": "5"}, "", {"prompt": "1 + 1?", "completion": "2"})
    first, second = read_demonstrations(path)
    assert first.messages == (Message(role="user", content="2 + 3?"),)
    assert (first.completion, second.completion) == ("5", "2")
    assert (first.place, second.place) == (f"{path}, line 1", f"{path}, line 3")


def test_prompt_and_completion_can_be_turns(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    parts = {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]}
    rows = [
        {"prompt": [system, USER], "completion": [ANSWER]},
        {"prompt": [system, parts], "completion": "5", "messages": None},
        {"prompt": json.dumps([system, USER]), "completion": [ANSWER]},
        {"messages": json.dumps([system, USER, ANSWER])},
    ]
    for read in read_demonstrations(_file(tmp_path, *rows)):
        assert read.messages == (Message(**system), Message(**USER))
        assert read.completion == "5"


def test_s1k_rows_get_d1s_format(tmp_path: Path) -> None:
    row = {"question": "2 + 3?", "thinking_trajectories": ["Three more.", "x"], "attempt": "5", "cot_type": "math"}
    (read,) = read_demonstrations(_file(tmp_path, row))
    assert read.messages == (Message(role="user", content=f"{D1_FORMAT}\n2 + 3?"),)
    assert read.completion == "<reasoning>\nThree more.\n</reasoning>\n<answer>\n5\n</answer>"


S1K = {"question": "q", "thinking_trajectories": ["t"], "attempt": "a"}
REFUSED = [
    ({"messages": [USER]}, "there is no answer: the last of messages is the user's; it should be the assistant's"),
    ({"messages": [USER, {**ANSWER, "content": " \n"}]}, r"messages\[1\].content is empty; it should be what the"),
    ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\].content is missing; it should be a text"),
    ({"messages": [ANSWER]}, "messages has the assistant's answer alone; what it answers should come before it"),
    ({"messages": []}, r"messages is \[\]; it should be a list that ends with the assistant's answer"),
    ({"messages": ["hi"]}, r'messages\[0\] is "hi"; it should be an object with role and content'),
    ({"messages": [{"role": "human", "content": "x"}]}, r'messages\[0\].role is "human"; it should be system, user or'),
    ({"prompt": "2 + 3?"}, "completion is missing; it should be a text: the answer to train on"),
    ({"prompt": "2 + 3?", "completion": ""}, "completion is empty; it should be the answer to train on"),
    ({"completion": "5"}, "prompt is missing; it should be a text or a list of turns: what the policy is asked"),
    ({"prompt": [USER], "completion": [USER]}, "completion has the turns user; it should have one, the assistant's"),
    ({"prompt": [USER], "completion": [ANSWER, ANSWER]}, "completion has the turns assistant, assistant; it should"),
    ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, "prompt ends with the assistant's turn; what is trained on"),
    ({"prompt": [USER], "completion": []}, r"completion is \[\]; it should be a list that has the assistant's answer"),
    ({"messages": None}, "messages is missing; it should be a list"),
    ({**S1K, "attempt": None}, "attempt is missing; it should be a text: the answer to train on"),
    ({**S1K, "thinking_trajectories": []}, r"thinking_trajectories is \[\]; it should be a list of texts"),
    ({**S1K, "thinking_trajectories": [7]}, r"thinking_trajectories\[0\] is 7; it should be a text"),
    ({"body": "5"}, "it has body; it should have messages, prompt and completion, text, or s1K's question"),
    ({"text": 5}, "text is 5; it should be a text: the document to train on"),
    ({"text": " ", "id": 3}, "text is empty; it should be the document to train on"),
    ({}, "it has no keys; it should have messages"),
    ('{"prompt": "\\ud800", "completion": "5"}', "prompt has half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_an_invalid_line_is_refused_with_its_number(line: object, sentence: str, tmp_path: Path) -> None:
    path = _file(tmp_path, {"prompt": "q", "completion": "a"}, line)
    with pytest.raises(ValueError, match=rf"^{path}, line 2: {sentence}") as refused:
        read_demonstrations(path)
    assert "\n" not in str(refused.value)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.jsonl cannot be read: no such file or directory"):
        read_demonstrations(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"data.jsonl has no rows"):
        read_demonstrations(_file(tmp_path, " ", ""))
    with pytest.raises(ValueError, match=r"data.jsonl, line 1 is \[1\]; it should be an object"):
        read_demonstrations(_file(tmp_path, [1]))


def test_parquet_is_read_like_json_lines(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER, {"role": "user", "content": "And 1 more?"}, {"role": "assistant", "content": "6"}]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    of_parquet = read_demonstrations(tmp_path / "data.parquet")
    of_lines = read_demonstrations(_file(tmp_path, *rows))
    assert [one.messages for one in of_parquet] == [one.messages for one in of_lines]
    assert [one.completion for one in of_parquet] == ["5", "6"]
    assert of_parquet[1].place == f"{tmp_path / 'data.parquet'}, row 2"


def test_text_rows_are_documents_unless_they_have_a_conversation(tmp_path: Path) -> None:
    rows = [{"text": "A tale."}, {"text": ""}, {"text": "x", "messages": [USER, ANSWER]}, {"text": "B", "prompt": None}]
    path = _file(tmp_path, *rows)
    first, second, third = read_demonstrations(path)
    assert (first.is_text, first.completion, first.place) == (True, "A tale.", f"{path}, line 1")
    assert (second.is_text, second.completion) == (False, "5")
    assert (third.is_text, third.completion) == (True, "B")
    parquet.write_table(pa.Table.from_pylist([{"text": "A tale."}]), tmp_path / "data.parquet")
    assert [one.completion for one in read_demonstrations(tmp_path / "data.parquet")] == ["A tale."]
    with pytest.raises(ValueError, match=r"data.jsonl has no text$"):
        read_demonstrations(_file(tmp_path, {"text": " "}))


def test_text_files_are_documents(tmp_path: Path) -> None:
    (tmp_path / "inside" / ".git").mkdir(parents=True)
    for name, text in {
        "b.md": "# Title\n\nB.\n",
        "inside/a.txt": "\ufeffOne.\n<|endoftext|>\nTwo.\n<|endoftext|>\n",
        "inside/.git/c.txt": "hidden",
        "inside/code.py": "other",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    read = read_demonstrations(tmp_path)
    assert [one.completion for one in read] == ["# Title\n\nB.", "One.", "Two."]
    assert [one.place for one in read[1:]] == [f"{tmp_path}/inside/a.txt, document {number}" for number in (1, 2)]
    assert [one.completion for one in read_demonstrations(tmp_path / "b.md")] == ["# Title\n\nB."]
    # A text file next to the rows describes them.
    _file(tmp_path, {"prompt": "2 + 3?", "completion": "5"})
    assert [one.completion for one in read_demonstrations(tmp_path)] == ["5"]


def test_an_unreadable_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for data, sentence in (
        (b"a\n\xff", "line 2: byte 1 is not UTF-8; save the file as UTF-8"),
        (b"PK\x03\x04", "is a workbook of Excel or a zip archive"),
        (b" \n", "has no text"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"x\.txt,? {sentence}"):
            read_demonstrations(path)
    with pytest.raises(ValueError, match=r"absent\.md cannot be read: no such file"):
        read_demonstrations(tmp_path / "absent.md")
