"""Resumable file of responses: whole lines, and a progress file next to it.

A resumed writer truncates what was not finished and continues from there.
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

from actors.atomic_file import replace_file
from deploy.errors import UserError, os_errors
from deploy.printing import counted, duration


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseProgress:
    """Progress of a file of responses."""

    num_prompts: int
    """Total number of prompts."""
    num_answered: int = 0
    """Prompts that the model has answered."""
    num_bytes: int = 0
    """Bytes of the file's whole lines."""
    num_kept: int = 0
    """Responses in the file."""
    num_cut: int = 0
    """Responses in the file that did not end within `max_new_tokens`, and were cut to their whole sentences."""
    num_unfinished: int = 0
    """Responses left out because no sentence of theirs ended within `max_new_tokens`."""
    num_empty: int = 0
    """Responses left out because they are empty."""
    num_overlong: int = 0
    """Prompts left out because the model's context has no room for them and a response."""
    num_tokens: int = 0
    """Generated tokens, including those of the responses left out."""
    seconds: float = 0.0
    """Time of the generation."""

    @property
    def is_complete(self) -> bool:
        """Whether all prompts are done."""
        return self.num_answered + self.num_overlong == self.num_prompts

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the generation."""
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
    """Append-only file of responses. Create it with `open`."""

    def __init__(self, path: Path, file: IO[bytes], facts: Mapping[str, Any], progress: ResponseProgress) -> None:
        self._path, self._file, self._facts = path, file, facts
        self.progress = progress
        """Its progress."""

    @classmethod
    @contextmanager
    def open(cls, path: Path, facts: Mapping[str, Any], num_prompts: int) -> Iterator[ResponseFile]:
        """Open or create the file, locked by this process until it is closed.

        Args:
            path: the file.
            facts: model, prompts and sampling, as JSON values; an existing file must have the same.
            num_prompts: total number of prompts.

        Raises:
            UserError: it has other content, another process writes it, or it cannot be written.
        """
        with os_errors(f"cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                _lock(path, file)
                progress = _resumed(path, file, facts, ResponseProgress(num_prompts=num_prompts))
                try:
                    yield cls(path, file, facts, progress)
                except UserError:
                    # If the model cannot answer, leave no file. An interrupt before the first answer is no UserError:
                    # the file stays, for resuming.
                    if not _progress_of(path).exists():
                        path.unlink()
                    raise

    def add(self, rows: Sequence[Mapping[str, Any]], progress: ResponseProgress) -> None:
        """Append rows, and save `progress` with the new number of bytes."""
        self._file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
        self._file.flush()
        self.progress = replace(progress, num_bytes=self._file.tell())
        replace_file(
            _progress_of(self._path), json.dumps({"asked": self._facts, "written": asdict(self.progress)}) + "\n"
        )


def _progress_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.progress")


def _lock(path: Path, file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{path} is being written by another process; wait for it, or take another file") from error


def _resumed(path: Path, file: IO[bytes], facts: Mapping[str, Any], new: ResponseProgress) -> ResponseProgress:
    """Return the file's progress, and truncate what comes after it."""
    size = file.seek(0, os.SEEK_END)
    found = _read(_progress_of(path))
    if found is None:
        if size:
            raise UserError(
                f"{path} already exists, and is not a file of a model's responses; remove it, or take another file"
            )
        return new
    before, progress = found
    for key in facts:
        if before.get(key) != facts[key]:
            raise UserError(
                f"{path} has responses to something else: {key} was {json.dumps(before.get(key))}, and is "
                f"{json.dumps(facts[key])}; remove it, or take another file"
            )
    if size < progress.num_bytes:
        raise UserError(f"{path} is shorter than it was; remove it and {_progress_of(path).name} to start over")
    file.truncate(progress.num_bytes)
    return progress


def _read(file: Path) -> tuple[dict[str, Any], ResponseProgress] | None:
    """Return the facts and the progress from the progress file; None if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return dict(found["asked"]), ResponseProgress(**found["written"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged; remove it and the responses next to it to start over") from error
