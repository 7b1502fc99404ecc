"""The file that responses are written to: whole lines, and beside it how far it is.

A writer that was stopped cuts off what it had not finished and goes on from there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from deploy.errors import UserError, reason
from deploy.printing import counted, duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """How far a file of responses is."""

    num_prompts: int
    """Prompts in all."""
    num_answered: int = 0
    """Prompts that the model has answered."""
    num_bytes: int = 0
    """Of the file's whole lines."""
    num_kept: int = 0
    """Responses in the file."""
    num_cut: int = 0
    """Responses in the file that did not end within `max_new_tokens`, of which the whole sentences are kept."""
    num_unfinished: int = 0
    """Responses left out because not one sentence of theirs ended in time."""
    num_empty: int = 0
    """Responses left out because they say nothing."""
    num_overlong: int = 0
    """Prompts left out because the model's context has no room for them and a response."""
    num_tokens: int = 0
    """Tokens generated, those of the responses left out included."""
    seconds: float = 0.0
    """What the generation took."""

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing left to do."""
        return self.num_answered + self.num_overlong == self.num_prompts

    @property
    def tokens_per_s(self) -> float:
        """How fast they were generated."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        notes = {
            "cut after a sentence": self.num_cut,
            "left out without a whole sentence": self.num_unfinished,
            "left out as empty": self.num_empty,
            "left out for too long a prompt": self.num_overlong,
        }
        reasons = "".join(f", {count} {what}" for what, count in notes.items() if count)
        took = f"{duration(self.seconds)}, {self.tokens_per_s:.0f} tokens/s"
        return f"{self.num_kept} of {counted(self.num_prompts, 'response')} kept{reasons}; {took}"


class ResponseFile:
    """A file of responses that is added to. Use `opened`."""

    def __init__(self, path: Path, file: IO[bytes], facts: Mapping[str, Any], written: Written) -> None:
        self._path, self._file, self._facts = path, file, facts
        self.written = written
        """How far it is."""

    @classmethod
    @contextmanager
    def opened(cls, path: Path, facts: Mapping[str, Any], num_prompts: int) -> Iterator[ResponseFile]:
        """Open the file, or begin it. It is this process's alone until it is closed.

        Args:
            path: the file.
            facts: what was asked, of which model; JSON values.
            num_prompts: prompts in all.

        Raises:
            UserError: it has something else in it, another process writes it, or it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                _lock(path, file)
                written = _resumed(path, file, facts, Written(num_prompts=num_prompts))
                try:
                    yield cls(path, file, facts, written)
                except UserError:
                    # What cannot be answered leaves nothing; who is stopped before the first answer goes on from here.
                    if not _beside(path).exists():
                        path.unlink()
                    raise
        except OSError as error:
            raise UserError(f"cannot write {path}: {reason(error)}") from error

    def add(self, rows: Sequence[Mapping[str, Any]], written: Written) -> None:
        """Keep rows, after which the file is as far as `written` says, but for its bytes."""
        self._file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
        self._file.flush()
        self.written = replace(written, num_bytes=self._file.tell())
        beside = _beside(self._path)
        new = beside.with_name(f"{beside.name}.new")
        new.write_text(json.dumps({"asked": self._facts, "written": asdict(self.written)}) + "\n", encoding="utf-8")
        new.replace(beside)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.progress")


def _lock(path: Path, file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{path} is being written by another process; wait for it, or take another file") from error


def _resumed(path: Path, file: IO[bytes], facts: Mapping[str, Any], new: Written) -> Written:
    """How far the file is; what comes after that is cut off."""
    size = file.seek(0, os.SEEK_END)
    found = _read(_beside(path))
    if found is None:
        if size:
            raise UserError(
                f"{path} is there already, and is no file of a model's responses; remove it, or take another file"
            )
        return new
    before, written = found
    for key in facts:
        if before.get(key) != facts[key]:
            raise UserError(
                f"{path} has responses to something else: {key} was {json.dumps(before.get(key))}, and is "
                f"{json.dumps(facts[key])}; remove it, or take another file"
            )
    if size < written.num_bytes:
        raise UserError(f"{path} is shorter than it was; remove it and {_beside(path).name} to begin again")
    file.truncate(written.num_bytes)
    return written


def _read(beside: Path) -> tuple[dict[str, Any], Written] | None:
    """What was asked and how far it is; None where there is nothing of the kind."""
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
        return dict(found["asked"]), Written(**found["written"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{beside} is damaged; remove it and the file beside it to begin again") from error
