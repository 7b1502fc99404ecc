"""Responses of an autoregressive model to prompts, written as a chat file for SFT."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.adapt.generation import Response, Sampling, batches_of, encoded, open_generator
from deploy.adapt.prompts import Conversation
from deploy.adapt.response_file import ResponseFile, Written
from deploy.errors import UserError
from deploy.printing import duration
from learner.seeds import fold
from rewards.problem import chat

if TYPE_CHECKING:
    from learner.model.autoregressive.source import AutoregressiveCheckpoint

# End of a sentence, with its closing quotes. A dot after a digit may number a list or be a decimal point.
_SENTENCE_END = re.compile(r"(?<!\d)[.!?]+[\"')\]\u201d\u2019]*(?=\s|$)")


def write_responses(
    source: AutoregressiveCheckpoint,
    prompts: Sequence[Conversation],
    path: Path,
    sampling: Sampling,
    say: Callable[[str], object] = lambda _: None,
) -> Written:
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
    facts = {"model": str(source.path), "prompts": _digest(prompts), **asdict(sampling)}
    with ResponseFile.opened(path, facts, len(prompts)) as file:
        if not file.written.is_whole:
            try:
                _generate(source, prompts, sampling, file, say)
            except ValueError as error:
                raise UserError(str(error)) from error
        if not file.written.num_kept:
            raise UserError(f"no response is left to train on: {file.written}; a larger sft.max_tokens gives them room")
        return file.written


def _generate(
    source: AutoregressiveCheckpoint,
    prompts: Sequence[Conversation],
    sampling: Sampling,
    file: ResponseFile,
    say: Callable[[str], object],
) -> None:
    """Generate and append the missing responses. Raises ValueError if the model cannot be read or prompted."""
    tokenizer = source.tokenizer()
    asked = encoded(source, tokenizer, prompts, sampling.max_new_tokens)
    file.written = replace(file.written, num_overlong=len(prompts) - len(asked))
    generator = open_generator(source, tokenizer, sampling)
    began, num_before = time.monotonic(), file.written.num_answered
    for batch in batches_of(asked[num_before:], generator.batch_size):
        batch_began = time.monotonic()
        responses = generator.generate([one.ids for one in batch], [fold(sampling.seed, one.index) for one in batch])
        texts = [_kept(tokenizer, response) for response in responses]
        rows = [
            {"messages": [*chat(prompts[one.index]), {"role": "assistant", "content": text}], "index": one.index}
            for one, text in zip(batch, texts, strict=True)
            if text.strip()
        ]
        file.add(rows, _counted(file.written, responses, texts, time.monotonic() - batch_began))
        pace = (time.monotonic() - began) / (file.written.num_answered - num_before)
        left = duration(pace * (len(asked) - file.written.num_answered))
        done = f"{file.written.num_answered} of {len(asked)} responses"
        say(f"{source.name} answers the prompts: {done}, {file.written.tokens_per_s:.0f} tokens/s, {left} left")


def _kept(tokenizer: Any, response: Response) -> str:
    """Return the text to train on: of an unfinished response its whole sentences, because SFT teaches the end of text
    there."""
    text = str(tokenizer.decode(list(response.token_ids), skip_special_tokens=True))
    if response.is_ended:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def _counted(written: Written, responses: Sequence[Response], texts: Sequence[str], seconds: float) -> Written:
    """Return a file's progress after a batch with these responses and remaining texts."""
    kept = Counter(one.is_ended for one, text in zip(responses, texts, strict=True) if text.strip())
    given = Counter(one.is_ended for one in responses)
    return replace(
        written,
        num_answered=written.num_answered + len(responses),
        num_kept=written.num_kept + kept.total(),
        num_cut=written.num_cut + kept[False],
        num_unfinished=written.num_unfinished + given[False] - kept[False],
        num_empty=written.num_empty + given[True] - kept[True],
        num_tokens=written.num_tokens + sum(len(one.token_ids) + one.is_ended for one in responses),
        seconds=written.seconds + seconds,
    )


def _digest(prompts: Sequence[Conversation]) -> str:
    return sha256(json.dumps([chat(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
