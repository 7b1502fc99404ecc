"""Record of a cell: a JSONL file with the settings in the first line, then one line per answer.

Only complete batches count, so that an interrupted evaluation resumes after the last of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.files.atomic_file import replace_file
from deploy.errors import UserError, os_errors, reason
from deploy.offline.item import Answer, AnsweredBatch
from deploy.runs.lock import RunLock


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRecord:
    """Current content of a cell's file."""

    facts: Mapping[str, Any]
    """Settings of the cell, and its checkpoint."""
    batches: dict[int, AnsweredBatch]
    """Completed batches by index."""

    @property
    def is_complete(self) -> bool:
        """Whether all answers exist."""
        return len(self.answers) == self.facts.get("num_answers")

    @property
    def answers(self) -> list[Answer]:
        """All answers, in order of the batches."""
        return [answer for _, batch in sorted(self.batches.items()) for answer in batch.answers]

    @property
    def by_problem(self) -> dict[str, list[Answer]]:
        """The answers to each problem."""
        found: dict[str, list[Answer]] = {}
        for answer in self.answers:
            found.setdefault(answer.problem_id, []).append(answer)
        return found

    @property
    def seconds(self) -> float:
        """Total worker time, in seconds."""
        return sum(batch.seconds for batch in self.batches.values())


class RecordWriter:
    """Writer of the file of one cell."""

    def __init__(self, path: Path, facts: Mapping[str, Any], sizes: Sequence[int]) -> None:
        """Open the file, or create it.

        `facts` are the settings of the cell and its checkpoint, `sizes` the number of answers of each batch.
        Raises UserError if the file has answers for other settings, or cannot be written.
        """
        self.path = path
        """The file."""
        facts = {**facts, "num_answers": sum(sizes)}
        with os_errors(f"cannot write {path}"):
            found = read_record(path) if path.is_file() else CellRecord(facts=facts, batches={})
        if (changed := _changed(found.facts, facts)) is not None:
            raise UserError(f"{path} has answers to something else: {changed}; take another --out, or remove the file")
        done = {
            index: batch
            for index, batch in found.batches.items()
            if index < len(sizes) and len(batch.answers) == sizes[index]
        }
        self.recorded = CellRecord(facts=facts, batches=done)
        """Current content of the file."""
        lines = [json.dumps({"asked": facts}), *(line for batch in done.values() for line in _lines(batch))]
        with os_errors(f"cannot write {path}"):
            replace_file(path, "".join(f"{line}\n" for line in lines))

    def add(self, batch: AnsweredBatch) -> None:
        """Append a batch to the file. Raises UserError if it cannot be written."""
        with os_errors(f"cannot write {self.path}"), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in _lines(batch)))
        self.recorded.batches[batch.index] = batch


def read_record(path: Path) -> CellRecord:
    """Read the complete lines of a record. Raises UserError if the file is not a record."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        facts = json.loads(first)["asked"]
        # A line that was being written when the process ended has no newline.
        rows = [json.loads(line) for line in lines[:-1]]
        batches: dict[int, dict[tuple[str, int], dict[str, Any]]] = {}
        for row in rows:
            batches.setdefault(row.pop("batch"), {})[row["problem_id"], row["sample"]] = row
        return CellRecord(
            facts=facts,
            batches={
                index: AnsweredBatch(
                    index=index,
                    seconds=sum(row.pop("seconds") for row in some.values()),
                    answers=tuple(Answer(**row) for row in some.values()),
                )
                for index, some in batches.items()
            },
        )
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} is no record of an evaluation; remove it, or take another --out") from error


def records_in(directory: Path) -> dict[str, CellRecord]:
    """Read the records of a directory by name. Other files are ignored; a missing directory has no records."""
    found = {}
    with suppress(OSError):
        for path in sorted(directory.glob("*.jsonl")):
            with suppress(UserError):
                found[path.stem] = read_record(path)
    return found


def take_lock(directory: Path, what: str = "evaluation") -> RunLock:
    """Lock a directory of records, and create it if needed. `what` names its content in messages.

    Raises UserError if another process holds the lock, or the directory cannot be written.
    """
    with os_errors(f"cannot write {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    return RunLock.take(directory, what)


def _lines(batch: AnsweredBatch) -> list[str]:
    share = batch.seconds / len(batch.answers)
    return [
        json.dumps({"batch": batch.index, **asdict(answer), "seconds": round(share, 6)}) for answer in batch.answers
    ]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> str | None:
    """Describe the first setting that changed; None if none did."""
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if (changed := _changed(old, new, f"{place}{key}.")) is not None:
                return changed
        elif old != new:
            return f"{place}{key} was {json.dumps(old)}, and is {json.dumps(new)}"
    return None
