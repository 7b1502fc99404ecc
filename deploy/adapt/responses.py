"""Responses of an autoregressive model to prompts, written as a chat file for SFT.

The file has whole lines, and a progress file next to it. A resumed writer truncates what was not finished and continues
from there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from actors.files.atomic_file import replace_file
from deploy.adapt.prompts import Conversation, batches_of, encode_prompts
from deploy.errors import UserError, os_errors, user_errors
from deploy.printing import counted, duration
from learner.seeds import fold
from rewards.problem import chat
from rollout.autoregressive.generator import ModelResponse, Sampling, open_generator

if TYPE_CHECKING:
    from learner.model.autoregressive.source import AutoregressiveCheckpoint

# End of a sentence, with its closing quotes. A dot after a digit may number a list or be a decimal point.
_SENTENCE_END = re.compile(r"(?<!\d)[.!?]+[\"')\]\u201d\u2019]*(?=\s|$)")


class ResponseOutcome(StrEnum):
    """What became of a response; summaries count all but the first."""

    KEPT = "kept whole"
    CUT = "cut after a sentence"
    """It did not end within `max_new_tokens`; its whole sentences are kept."""
    UNFINISHED = "left out without a whole sentence"
    """No sentence of it ended within `max_new_tokens`."""
    EMPTY = "left out as empty"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseProgress:
    """Progress of a file of responses."""

    num_prompts: int
    """Total number of prompts."""
    num_overlong: int = 0
    """Prompts left out because the model's context has no room for them and a response."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Number of responses by `ResponseOutcome`."""
    num_bytes: int = 0
    """Bytes of the file's whole lines."""
    num_tokens: int = 0
    """Generated tokens, including those of the responses left out."""
    seconds: float = 0.0
    """Time of the generation."""

    @property
    def num_answered(self) -> int:
        """Prompts that the model has answered."""
        return sum(self.outcomes.values())

    @property
    def num_kept(self) -> int:
        """Responses in the file."""
        return sum(self.outcomes.get(kept, 0) for kept in (ResponseOutcome.KEPT, ResponseOutcome.CUT))

    @property
    def is_complete(self) -> bool:
        """Whether all prompts are done."""
        return self.num_answered + self.num_overlong == self.num_prompts

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the generation."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        notes: dict[str, int] = {outcome: self.outcomes.get(outcome, 0) for outcome in list(ResponseOutcome)[1:]}
        notes |= {"left out for too long a prompt": self.num_overlong}
        reasons = "".join(f", {count} {what}" for what, count in notes.items() if count)
        took = f"{duration(self.seconds)}, {self.tokens_per_s:.0f} tokens/s"
        return f"{self.num_kept} of {counted(self.num_prompts, 'response')} kept{reasons}; {took}"


def write_responses(
    source: AutoregressiveCheckpoint,
    prompts: Sequence[Conversation],
    path: Path,
    sampling: Sampling,
    say: Callable[[str], object] = lambda _: None,
) -> ResponseProgress:
    """Write the model's own response to each prompt as a line with `messages`; resume an earlier attempt.

    Args:
        source: the autoregressive model.
        prompts: the prompts.
        path: the file, which `sft.data` can name.
        sampling: sampling parameters of the responses.
        say: receives progress messages.

    Raises:
        UserError: the model cannot be read or has no chat template, no prompt fits into its context, no response is
            left to train on, or the file has other content or cannot be written.
    """
    digest = sha256(json.dumps([chat(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
    facts = {"model": str(source.path), "prompts": digest, **asdict(sampling)}
    with ResponseFile.open(path, facts, len(prompts)) as file:
        if not file.progress.is_complete:
            with user_errors(ValueError):
                _generate(source, prompts, sampling, file, say)
        if not file.progress.num_kept:
            raise UserError(
                f"no response is left to train on: {file.progress}; a larger sft.max_tokens gives them room"
            )
        return file.progress


def _generate(
    source: AutoregressiveCheckpoint,
    prompts: Sequence[Conversation],
    sampling: Sampling,
    file: ResponseFile,
    say: Callable[[str], object],
) -> None:
    """Generate and append the missing responses. Raises ValueError if the model cannot be read or prompted."""
    tokenizer = source.tokenizer()
    encoded = encode_prompts(source, tokenizer, prompts, sampling.max_new_tokens)
    file.progress = replace(file.progress, num_overlong=len(prompts) - len(encoded))
    generator = open_generator(source, tokenizer, sampling)
    began, num_before = time.monotonic(), file.progress.num_answered
    for batch in batches_of(encoded[num_before:], generator.batch_size):
        batch_began = time.monotonic()
        responses = generator.generate([one.ids for one in batch], [fold(sampling.seed, one.index) for one in batch])
        texts, outcomes = zip(*(_kept(tokenizer, response) for response in responses), strict=True)
        rows = [
            {"messages": [*chat(prompts[one.index]), {"role": "assistant", "content": text}], "index": one.index}
            for one, text in zip(batch, texts, strict=True)
            if text
        ]
        done = replace(
            file.progress,
            outcomes=dict(Counter(file.progress.outcomes) + Counter(outcomes)),
            num_tokens=file.progress.num_tokens + sum(len(one.token_ids) + one.is_ended for one in responses),
            seconds=file.progress.seconds + time.monotonic() - batch_began,
        )
        file.add(rows, done)
        pace = (time.monotonic() - began) / (file.progress.num_answered - num_before)
        left = duration(pace * (len(encoded) - file.progress.num_answered))
        share = f"{file.progress.num_answered} of {len(encoded)} responses"
        say(f"{source.name} answers the prompts: {share}, {file.progress.tokens_per_s:.0f} tokens/s, {left} left")


def _kept(tokenizer: Any, response: ModelResponse) -> tuple[str, ResponseOutcome]:
    """Return the text to train on, empty for none, and why.

    Of an unfinished response these are its whole sentences, because SFT teaches the end of text there.
    """
    text = str(tokenizer.decode(list(response.token_ids), skip_special_tokens=True))
    if response.is_ended:
        return (text, ResponseOutcome.KEPT) if text.strip() else ("", ResponseOutcome.EMPTY)
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return (text[: ends[-1]], ResponseOutcome.CUT) if ends else ("", ResponseOutcome.UNFINISHED)


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
