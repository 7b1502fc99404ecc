"""The record of a cell: a file with a line of what was asked, then a line for each answer, batch after batch.

What is whole of it counts, so that an evaluation that was stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from deploy.errors import UserError, reason
from deploy.evaluation.worker import Answer, Answered
from deploy.runs.lock import RunLock
from learner.model.checkpoint_files import checkpoint_chain
from learner.model.families.raw_config import CONFIG
from learner.model.hub import ADAPTER_CONFIG
from learner.model.peft_directory.config import is_peft
from learner.model.storage.references import read_references, why_gone

_WEIGHTS = ("*.safetensors", "*.bin")
_SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A cell's file, as it stands."""

    facts: Mapping[str, Any]
    """What was asked, of which checkpoint."""
    batches: Mapping[int, Answered]
    """The batches that are done, by their place."""

    @property
    def is_whole(self) -> bool:
        """Whether every answer is there."""
        return len(self.answers) == self.facts.get("num_answers")

    @property
    def answers(self) -> list[Answer]:
        """All that there are, in the order of the problems."""
        return [answer for _, batch in sorted(self.batches.items()) for answer in batch.answers]

    @property
    def seconds(self) -> float:
        """What they took the workers, added up."""
        return sum(batch.seconds for batch in self.batches.values())


class Record:
    """The file of one cell, for whoever adds to it."""

    def __init__(self, path: Path, facts: Mapping[str, Any], sizes: Sequence[int]) -> None:
        """Open it, or begin it.

        Args:
            path: the file.
            facts: what is asked, of which checkpoint.
            sizes: answers of each batch.

        Raises:
            UserError: the file has answers to something else, or cannot be written.
        """
        self.path = path
        """The file."""
        self._facts = facts = {**facts, "num_answers": sum(sizes)}
        try:
            found = read_record(path) if path.is_file() else Recorded(facts=facts, batches={})
        except OSError as error:
            raise UserError(f"cannot write {path}: {reason(error)}") from error
        if (changed := _changed(found.facts, facts)) is not None:
            raise UserError(f"{path} has answers to something else: {changed}; take another --out, or remove the file")
        self.done = {
            index: batch
            for index, batch in found.batches.items()
            if index < len(sizes) and len(batch.answers) == sizes[index]
        }
        """The batches that are done, by their place."""
        lines = [json.dumps({"asked": facts}), *(line for batch in self.done.values() for line in _lines(batch))]
        try:
            beside = path.with_name(f".{path.name}.new")
            beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {reason(error)}") from error

    @property
    def recorded(self) -> Recorded:
        """As it stands."""
        return Recorded(facts=self._facts, batches=self.done)

    def add(self, batch: Answered) -> None:
        """Keep a batch. Raises UserError where the disk takes no more."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in _lines(batch)))
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {reason(error)}") from error
        self.done[batch.index] = batch


def read_record(path: Path) -> Recorded:
    """What is whole of a record. Raises UserError where it is none."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        facts = json.loads(first)["asked"]
        # A line that was being written when the process ended has no end.
        rows = [json.loads(line) for line in lines[:-1]]
        batches: dict[int, dict[tuple[str, int], dict[str, Any]]] = {}
        for row in rows:
            batches.setdefault(row.pop("batch"), {})[row["problem_id"], row["sample"]] = row
        return Recorded(
            facts=facts,
            batches={
                index: Answered(
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


def records_in(directory: Path) -> dict[str, Recorded]:
    """The records of a directory by their names; what is none is left out, and a directory that is none has none."""
    found = {}
    with suppress(OSError):
        for path in sorted(directory.glob("*.jsonl")):
            with suppress(UserError):
                found[path.stem] = read_record(path)
    return found


def take_lock(directory: Path, what: str = "evaluation") -> RunLock:
    """The lock of a directory of records, which is made where it is not there; in it lies what `what` names.

    Raises UserError where another process has it, or the directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {directory}: {reason(error)}") from error
    return RunLock.take(directory, what)


def fingerprint(checkpoint: Path) -> str:
    """Of a checkpoint's weights and config: what is at the head and the end of each file, and how long it is.

    Raises OSError where they cannot be read, and ValueError where it stands on weights that are not there.
    """
    *adapted, _ = checkpoint_chain(checkpoint)
    if adapted:
        digest = sha256(b"".join(_fingerprint(one).encode() for one in checkpoint_chain(checkpoint)))
        return digest.hexdigest()[:16]
    return _fingerprint(checkpoint)


def _fingerprint(checkpoint: Path) -> str:
    """Of one directory alone."""
    digest = sha256((checkpoint / (ADAPTER_CONFIG if is_peft(checkpoint) else CONFIG)).read_bytes())
    files = {path for pattern in _WEIGHTS for path in checkpoint.glob(pattern)}
    for reference in read_references(checkpoint).values():
        if not reference.path.is_file():
            raise ValueError(why_gone(checkpoint, reference))
        files.add(reference.path)
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _lines(batch: Answered) -> list[str]:
    share = batch.seconds / len(batch.answers)
    return [
        json.dumps({"batch": batch.index, **asdict(answer), "seconds": round(share, 6)}) for answer in batch.answers
    ]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> str | None:
    """The first thing that is not as it was, in words; None where all is."""
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if (changed := _changed(old, new, f"{place}{key}.")) is not None:
                return changed
        elif old != new:
            return f"{place}{key} was {json.dumps(old)}, and is {json.dumps(new)}"
    return None
